"""AWQ (Lin et al. 2023): columns that large inputs meet are made larger before rounding, so that they lose less.

Both searches ask for the error of the outputs, which the second moments of the inputs give without the inputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from services.executor.quantize.grid import Grid, fit
from services.executor.quantize.moments import output_error

_RATIOS = 20
_CLIPS = 10
_LEAST_CLIP = 0.5


def find_factors(matrices: Sequence[tuple[Tensor, Grid]], gram: Tensor, magnitudes: Tensor) -> Tensor:
    """Factors of columns [K], magnitudes ** ratio for the ratio of 0 to 1 with the least error.

    `matrices` [N, K] multiply the same inputs, whose second moments are `gram` [K, K].
    """
    best, least = torch.ones_like(magnitudes), float("inf")
    floor = magnitudes.clamp(min=1e-4 * float(magnitudes.max()))
    for step in range(_RATIOS):
        factors = floor ** (step / _RATIOS)
        factors = factors / (factors.max() * factors.min()).sqrt()
        error = sum(output_error(_rounded(w * factors, grid) / factors - w, gram) for w, grid in matrices)
        if error < least:
            best, least = factors, error
    return best


def clip(weight: Tensor, gram: Tensor, grid: Grid) -> Tensor:
    """The matrix [N, K] with the largest weights of each group cut off as far as that lessens the group's own error."""
    width = grid.width(weight.shape[1])
    parts = [
        _clip_group(group, gram[i * width : (i + 1) * width, i * width : (i + 1) * width], grid)
        for i, group in enumerate(torch.split(weight, width, dim=1))
    ]
    return torch.cat(parts, 1)


def _clip_group(weights: Tensor, gram: Tensor, grid: Grid) -> Tensor:
    largest = weights.abs().amax(1, keepdim=True)
    best, least = weights, torch.full((len(weights), 1), torch.inf)
    for step in range(_CLIPS):
        bound = largest * (1 - step / _CLIPS * (1 - _LEAST_CLIP))
        clipped = torch.clamp(weights, -bound, bound)
        difference = fit(clipped, grid).rounded(clipped, grid) - weights
        error = (difference @ gram).mul_(difference).sum(1, keepdim=True)
        best = torch.where(error < least, clipped, best)
        least = torch.minimum(error, least)
    return best


def _rounded(weight: Tensor, grid: Grid) -> Tensor:
    groups = torch.split(weight, grid.width(weight.shape[1]), dim=1)
    return torch.cat([fit(group, grid).rounded(group, grid) for group in groups], 1)
