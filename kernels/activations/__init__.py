"""Activations rounded to 8 bits, as products of int8 and e4m3 take them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.activations.reference import quantize_plainly


@dataclass(frozen=True, slots=True)
class ActivationFormat:
    """x = code * scale; the greatest of those that share a scale becomes 127 or 448."""

    kind: str  # "int8" or "fp8" (e4m3)
    group: int = 0  # columns that share a scale, 128; 0: a row's


@dataclass(frozen=True, slots=True)
class Quantized:
    """T rows of K numbers."""

    codes: Tensor  # [T, K] int8, or e4m3
    scales: Tensor  # [T] fp32; in groups [T, ceil(K / group)]

    def dequantize(self) -> Tensor:
        """fp32 [T, K]."""
        codes = self.codes.float()
        if self.scales.dim() == 1:
            return codes * self.scales[:, None]
        return codes * self.scales.repeat_interleave(128, 1)[:, : codes.shape[1]]


def empty_quantized(rows: int, columns: int, format_: ActivationFormat, device: torch.device) -> Quantized:
    """Room for a result. ValueError for a format that there is not."""
    if format_.kind not in ("int8", "fp8") or format_.group not in (0, 128):
        raise ValueError(f"no activations of {format_}")
    dtype = torch.int8 if format_.kind == "int8" else torch.float8_e4m3fn
    scales = (rows, -(-columns // 128)) if format_.group else (rows,)
    return Quantized(
        torch.empty((rows, columns), dtype=dtype, device=device),
        torch.empty(scales, dtype=torch.float32, device=device),
    )


def quantize(x: Tensor, format_: ActivationFormat) -> Quantized:
    """Rounds x [T, K], neighbours in a row, to 8 bits, ties to even, on a GPU."""
    if x.dim() != 2 or x.stride(1) != 1:
        raise ValueError(f"quantize of {list(x.shape)} with strides {x.stride()}")
    found = empty_quantized(x.shape[0], x.shape[1], format_, x.device)
    from kernels.activations import triton_impl

    triton_impl.quantize(x, found, format_)
    return found


__all__ = ["ActivationFormat", "Quantized", "empty_quantized", "quantize", "quantize_plainly"]
