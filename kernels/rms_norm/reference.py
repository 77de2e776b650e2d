"""y = x / sqrt(mean(x^2) + epsilon) * weight, over the last dimension."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Normalizes x [T, H] with weight [H]. Computes in fp32; the result has x's type."""
    if x.dim() != 2 or weight.shape != x.shape[1:]:
        raise ValueError(f"rms_norm of {list(x.shape)} with a weight {list(weight.shape)}")
    wide = x.float()
    scale = torch.rsqrt((wide * wide).mean(-1, keepdim=True).add_(epsilon))
    return (wide * scale).to(x.dtype).mul_(weight)
