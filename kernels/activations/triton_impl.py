"""Rounds rows to 8 bits; other kernels that end in activations use the same parts."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.activations import ActivationFormat, Quantized
from kernels.gpu.device import gpu_of
from kernels.gpu.numbers import e4m3_codes, round_even

TILE = 2048
"""Columns of a program's step: no registers spill, and whole groups of 128."""


@triton.jit
def inverse_scale(reach, IS_INT8: tl.constexpr):
    """What numbers whose greatest magnitude is `reach` are multiplied by."""
    most: tl.constexpr = 127.0 if IS_INT8 else 448.0
    return tl.where(reach > 0, tl.div_rn(most, tl.where(reach > 0, reach, 1.0)), 0.0)


@triton.jit
def scale_of(reach, IS_INT8: tl.constexpr):
    most: tl.constexpr = 127.0 if IS_INT8 else 448.0
    return tl.div_rn(reach, most)


@triton.jit
def codes_of(scaled, IS_INT8: tl.constexpr, HAS_FP8: tl.constexpr):
    """Codes of numbers multiplied by the inverse scale: int8, or e4m3's bits."""
    if IS_INT8:
        codes = round_even(tl.minimum(tl.maximum(scaled, -127.0), 127.0)).to(tl.int8)
    else:
        codes = e4m3_codes(scaled, HAS_FP8)
    return codes


@triton.jit
def store_grouped(codes, scales, x, row, start, columns, IS_INT8: tl.constexpr, HAS_FP8: tl.constexpr, N: tl.constexpr):
    """Columns start .. start + N of a row, x [N] with zeros beyond the end, with a scale for each 128."""
    groups: tl.constexpr = N // 128
    x = tl.reshape(x, [groups, 128])
    reach = tl.max(tl.abs(x), 1)
    g = start // 128 + tl.arange(0, groups)
    group_count = tl.cdiv(columns, 128)
    tl.store(scales + row * group_count + g, scale_of(reach, IS_INT8), mask=g < group_count)
    d = g[:, None] * 128 + tl.arange(0, 128)[None, :]
    found = codes_of(x * inverse_scale(reach, IS_INT8)[:, None], IS_INT8, HAS_FP8)
    tl.store(codes + row * columns + d, found, mask=d < columns)


@triton.jit
def quantize_kernel(
    codes, scales, x, stride_row, columns, IS_INT8: tl.constexpr, GROUPED: tl.constexpr, HAS_FP8: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, N)
    if GROUPED:
        for start in range(0, columns, N):
            part = tl.load(x + row * stride_row + start + d, mask=start + d < columns, other=0).to(tl.float32)
            store_grouped(codes, scales, part, row, start, columns, IS_INT8, HAS_FP8, N)
    else:
        reach = tl.zeros([N], tl.float32)
        for start in range(0, columns, N):
            part = tl.load(x + row * stride_row + start + d, mask=start + d < columns, other=0).to(tl.float32)
            reach = tl.maximum(reach, tl.abs(part))
        most = tl.max(reach, 0)
        tl.store(scales + row, scale_of(most, IS_INT8))
        inverse = inverse_scale(most, IS_INT8)
        for start in range(0, columns, N):
            mask = start + d < columns
            part = tl.load(x + row * stride_row + start + d, mask=mask, other=0).to(tl.float32)
            tl.store(codes + row * columns + start + d, codes_of(part * inverse, IS_INT8, HAS_FP8), mask=mask)


def quantize(x: Tensor, found: Quantized, format_: ActivationFormat) -> None:
    """As kernels.activations.quantize, which has checked the arguments."""
    rows, columns = x.shape
    if rows:
        quantize_kernel[(rows,)](
            bits(found.codes), found.scales, x, x.stride(0), columns,
            IS_INT8=format_.kind == "int8", GROUPED=format_.group > 0, HAS_FP8=gpu_of(x.device).has_fp8,
            N=min(TILE, max(128, triton.next_power_of_2(columns))), num_warps=4,
        )  # fmt: skip


def bits(codes: Tensor) -> Tensor:
    """Codes as a type that every GPU can load and store."""
    return codes if codes.dtype == torch.int8 else codes.view(torch.uint8)
