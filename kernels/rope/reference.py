"""Rotates pairs (i, i + D / 2) of every head by the position's angles."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate_(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates x [T, heads, D] in place by cos and sin [T, 1, D]; the first half of `sin` is negated.

    The halves become x1 cos - x2 sin and x2 cos + x1 sin.
    """
    if x.dim() != 3 or cos.shape != (x.shape[0], 1, x.shape[2]) or sin.shape != cos.shape or x.shape[2] % 2:
        raise ValueError(f"rotate_ {list(x.shape)} by {list(cos.shape)} and {list(sin.shape)}")
    half = x.shape[2] // 2
    swapped = torch.cat((x[..., half:], x[..., :half]), dim=-1)
    return x.mul_(cos).add_(swapped.mul_(sin))
