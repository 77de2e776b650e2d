"""SmoothQuant (Xiao et al. 2022): inputs with outliers are divided where weights can take the factor more easily."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

STRENGTH = 0.5
"""How much of the difficulty moves from inputs to weights."""


def find_factors(matrices: Sequence[Tensor], peaks: Tensor) -> Tensor:
    """Factors of columns [K] for matrices [N, K] that multiply the same inputs; `peaks` are their largest."""
    weights = torch.stack([matrix.abs().amax(0) for matrix in matrices]).amax(0)
    usable = (peaks > 0) & (weights > 0)
    factors = peaks.clamp(min=1e-5) ** STRENGTH / weights.clamp(min=1e-5) ** (1 - STRENGTH)
    return torch.where(usable, factors, torch.ones_like(factors))
