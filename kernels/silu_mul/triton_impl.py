"""activation(gate) * up, rounded to 8 bits where asked; a scale for a whole row needs the row twice."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.activations import ActivationFormat, Quantized
from kernels.activations.triton_impl import TILE, bits, codes_of, inverse_scale, scale_of, store_grouped
from kernels.gpu.device import gpu_of


@triton.jit
def gated(gate_up, at, d, columns, ACTIVATION: tl.constexpr):
    """Products [N] in fp32 of columns d; zeros beyond the end."""
    mask = d < columns
    gate = tl.load(gate_up + at + d, mask=mask, other=0).to(tl.float32)
    up = tl.load(gate_up + at + columns + d, mask=mask, other=0).to(tl.float32)
    if ACTIVATION == "silu":
        active = gate / (1.0 + tl.exp(-gate))
    elif ACTIVATION == "gelu":
        active = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:
        # 0.5 * (1 + tanh(y)) is a sigmoid of 2 * y.
        active = gate / (1.0 + tl.exp(-1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)))
    return active * up


@triton.jit
def gate_mul_kernel(
    out, scales, gate_up, stride_row, columns, ACTIVATION: tl.constexpr, KIND: tl.constexpr, GROUPED: tl.constexpr,
    HAS_FP8: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = row * stride_row
    n = tl.arange(0, N)
    if KIND == "":
        d = tl.program_id(1) * N + n
        products = gated(gate_up, at, d, columns, ACTIVATION)
        tl.store(out + row * columns + d, products.to(out.dtype.element_ty), mask=d < columns)
    elif GROUPED:
        start = tl.program_id(1) * N
        products = gated(gate_up, at, start + n, columns, ACTIVATION)
        store_grouped(out, scales, products, row, start, columns, KIND == "int8", HAS_FP8, N)
    else:
        reach = tl.zeros([N], tl.float32)
        for start in range(0, columns, N):
            reach = tl.maximum(reach, tl.abs(gated(gate_up, at, start + n, columns, ACTIVATION)))
        most = tl.max(reach, 0)
        tl.store(scales + row, scale_of(most, KIND == "int8"))
        inverse = inverse_scale(most, KIND == "int8")
        for start in range(0, columns, N):
            products = gated(gate_up, at, start + n, columns, ACTIVATION)
            codes = codes_of(products * inverse, KIND == "int8", HAS_FP8)
            tl.store(out + row * columns + start + n, codes, mask=start + n < columns)


def gate_mul(gate_up: Tensor, activation: str, out: Tensor | Quantized, format_: ActivationFormat | None) -> None:
    """As kernels.silu_mul.gate_mul, which has checked the arguments."""
    rows, columns = gate_up.shape[0], gate_up.shape[1] // 2
    if not rows:
        return
    stored, scales = (out, gate_up) if isinstance(out, torch.Tensor) else (bits(out.codes), out.scales)
    tile = min(TILE, max(128, triton.next_power_of_2(columns)))
    by_row = format_ is not None and not format_.group
    gate_mul_kernel[(rows, 1 if by_row else triton.cdiv(columns, tile))](
        stored, scales, gate_up, gate_up.stride(0), columns, ACTIVATION=activation,
        KIND=format_.kind if format_ else "", GROUPED=not by_row, HAS_FP8=gpu_of(gate_up.device).has_fp8, N=tile,
        num_warps=4,
    )  # fmt: skip
