"""Root mean square normalization."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.activations import ActivationFormat, Quantized, empty_quantized
from kernels.rms_norm.reference import rms_norm

__all__ = ["add_rms_norm", "rms_norm"]


def add_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    epsilon: float,
    format_: ActivationFormat | None = None,
) -> Tensor | Quantized:
    """Adds x [T, H] to the residual stream in place, then normalizes that with weight [H], on a GPU.

    Without a residual x itself is normalized. Computes in fp32; the result has x's type, or is rounded to `format_`.
    """
    if x.dim() != 2 or weight.shape != x.shape[1:] or x.stride(1) != 1:
        raise ValueError(f"add_rms_norm of {list(x.shape)} with a weight {list(weight.shape)}")
    if residual is not None and (residual.shape != x.shape or not residual.is_contiguous()):
        raise ValueError(f"add_rms_norm of {list(x.shape)} with a residual {list(residual.shape)}")
    out: Tensor | Quantized
    if format_ is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    else:
        out = empty_quantized(x.shape[0], x.shape[1], format_, x.device)
    from kernels.rms_norm import triton_impl

    triton_impl.add_rms_norm(x, residual, weight, epsilon, out, format_)
    return out
