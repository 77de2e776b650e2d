"""How matrices are applied, by number format and device."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from services.executor.backends.torch_rows import RowSizes, multiply

_SCRATCH_VALUES = 1 << 19  # 2 MiB of fp32: stays in the outer caches
_NATIVE_ROWS = 2


class Linear(Protocol):
    """Applies matrices [N, K] to activations [T, K] of `dtype`, whose row count `rows` has padded."""

    dtype: torch.dtype
    rows: RowSizes

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor: ...


class ExactLinear:
    """fp32 on a CPU: a row's result depends on that row alone."""

    dtype = torch.float32

    def __init__(self, rows: RowSizes) -> None:
        self.rows = rows

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if x.shape[0] <= self.rows.largest:
            out = multiply(x, weight)
        else:
            out = torch.cat([multiply(x[piece], weight) for piece in self.rows.pieces(x.shape[0])])
        return out if bias is None else out.add_(bias)


class NativeLinear:
    """Formats that the device multiplies itself."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.rows = dtype, UNPADDED

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, weight, bias)


class WideningLinear:
    """bf16 and fp16 weights on CPUs that multiply only fp32: activations are fp32, weights are widened when used.

    Widening piece by piece into one small buffer reads no more memory than the narrow weights themselves and beats
    torch's own narrow products from three rows on; a second copy of the weights in fp32 would be no faster.
    """

    dtype = torch.float32

    def __init__(self) -> None:
        self.rows = UNPADDED
        self._scratch = torch.empty(_SCRATCH_VALUES)

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if x.shape[0] <= _NATIVE_ROWS and weight.dtype == torch.bfloat16:
            out = F.linear(x.to(weight.dtype), weight).float()
        else:
            out = self._widened(x, weight)
        return out if bias is None else out.add_(bias)

    def _widened(self, x: Tensor, weight: Tensor) -> Tensor:
        count, width = weight.shape
        step = max(1, _SCRATCH_VALUES // width)
        if width > _SCRATCH_VALUES:
            return F.linear(x, weight.float())
        out = x.new_empty(x.shape[0], count)
        for start in range(0, count, step):
            part = weight[start : start + step]
            wide = self._scratch[: part.numel()].view(part.shape)
            wide.copy_(part)
            if 16 <= x.shape[0] <= 64:  # as in torch_rows.multiply
                out[:, start : start + step] = torch.mm(wide, x.t()).t()
            else:
                torch.mm(x, wide.t(), out=out[:, start : start + step])
        return out


UNPADDED = RowSizes(tuple(range(1, 257)))
"""Row sizes where padding would only cost."""


def multiplies_bf16() -> bool:
    """Whether this CPU has instructions for bf16 products."""
    try:
        words = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return False
    return bool(words & {"avx512_bf16", "amx_bf16", "bf16"})
