"""Which numbers a group of weights may take, and rounding to the nearest of them.

A group's numbers are (code - zero) * scale with codes of a few bits. Scales are rounded to the format that they are
stored in before any code is chosen, so that what is written is what was meant.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from services.executor.quant.matrix import GroupedMatrix

_SEARCH_STEPS = 20
_SEARCH_LEAST = 0.5


@dataclass(frozen=True, slots=True)
class Grid:
    """How one matrix is rounded: data, so that matrices may differ."""

    bits: int
    group_size: int | None  # columns that share a scale; None: all
    is_symmetric: bool
    scale_dtype: torch.dtype  # that scales are stored in

    @property
    def levels(self) -> int:
        """The largest code."""
        return (1 << self.bits) - 1

    def width(self, columns: int) -> int:
        """Columns of a group in a matrix of so many."""
        return columns if self.group_size is None else min(self.group_size, columns)


@dataclass(frozen=True, slots=True)
class Numbers:
    """What codes of some groups mean: scales and zero points, fp32 [...]."""

    scale: Tensor
    zero: Tensor

    def codes(self, weights: Tensor, grid: Grid) -> Tensor:
        """The nearest codes of weights [..., width of a group], still fp32."""
        return torch.round(weights / self.scale[..., None]).add_(self.zero[..., None]).clamp_(0, grid.levels)

    def values(self, codes: Tensor) -> Tensor:
        """What codes [..., width of a group] mean."""
        return (codes - self.zero[..., None]).mul_(self.scale[..., None])

    def rounded(self, weights: Tensor, grid: Grid) -> Tensor:
        return self.values(self.codes(weights, grid))


def fit(weights: Tensor, grid: Grid) -> Numbers:
    """Numbers over the whole range of weights [..., width of a group]."""
    low, high = weights.amin(-1).clamp_(max=0), weights.amax(-1).clamp_(min=0)
    return _between(low, high, grid)


def fit_closest(weights: Tensor, grid: Grid, importance: Tensor) -> Numbers:
    """Numbers over that share of the range which makes the sum of importance [width] * error ** 2 least.

    Cutting off few large weights makes the steps between all others smaller.
    """
    low, high = weights.amin(-1).clamp_(max=0), weights.amax(-1).clamp_(min=0)
    best = _between(low, high, grid)
    least = _error(best, weights, grid, importance)
    for step in range(1, _SEARCH_STEPS):
        share = 1 - step / _SEARCH_STEPS * (1 - _SEARCH_LEAST)
        found = _between(low * share, high * share, grid)
        error = _error(found, weights, grid, importance)
        better = error < least
        least = torch.where(better, error, least)
        best = Numbers(torch.where(better, found.scale, best.scale), torch.where(better, found.zero, best.zero))
    return best


def round_to_nearest(weight: Tensor, grid: Grid) -> GroupedMatrix:
    """A matrix [N, K] with each weight at the nearest number of its group's range."""
    numbers, codes = [], []
    width = grid.width(weight.shape[1])
    for group in torch.split(weight, width, dim=1):
        numbers.append(fit(group, grid))
        codes.append(numbers[-1].codes(group, grid).to(torch.uint8))
    return grouped(torch.cat(codes, 1), numbers, width, grid)


def grouped(
    codes: Tensor, numbers: list[Numbers], width: int, grid: Grid, group_index: Tensor | None = None
) -> GroupedMatrix:
    """The neutral form of uint8 codes [N, K] and one `Numbers` [N] a group."""
    scales, zeros = (torch.stack(parts, 1) for parts in zip(*((n.scale, n.zero) for n in numbers), strict=True))
    return GroupedMatrix(
        bits=grid.bits,
        codes=codes.numpy(),
        scales=scales.numpy(),
        zeros=zeros.to(torch.int16).numpy(),
        group_size=width,
        group_index=None if group_index is None else group_index.to(torch.int32).numpy(),
    )


def _between(low: Tensor, high: Tensor, grid: Grid) -> Numbers:
    """Numbers from `low` to `high`; zero is among them."""
    levels = grid.levels
    if grid.is_symmetric:
        scale = torch.maximum(-low, high) * (2 / levels)
    else:
        # A zero point of 0 cannot be stored everywhere, so that there is always a number below zero.
        low = torch.minimum(low, high / (1 - levels))
        scale = (high - low) / levels
    stored = scale.to(grid.scale_dtype).float().clamp_(min=_least(grid.scale_dtype))
    scale = torch.where(scale == 0, torch.ones_like(scale), stored)
    if grid.is_symmetric:
        return Numbers(scale, torch.full_like(scale, 1 << (grid.bits - 1)))
    return Numbers(scale, torch.round(-low / scale).clamp_(1, levels))


def _least(dtype: torch.dtype) -> float:
    """The smallest number above zero."""
    return torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps


def _error(numbers: Numbers, weights: Tensor, grid: Grid, importance: Tensor) -> Tensor:
    return (numbers.rounded(weights, grid) - weights).square_().mul_(importance).sum(-1)
