"""y = x / sqrt(mean(x^2) + epsilon) * weight, over the last dimension."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Normalizes x [T, H] with weight [H]. Computes in fp32; the result has x's type."""
    if x.dim() != 2 or weight.shape != x.shape[1:]:
        raise ValueError(f"rms_norm of {list(x.shape)} with a weight {list(weight.shape)}")
    return F.rms_norm(x, weight.shape, weight, epsilon)
