"""Number formats inside kernels, rounded bit for bit as the CPU's code rounds them."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def round_even(x):
    """The nearest whole number of fp32, ties to even; magnitudes below 2 ** 22."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def bf16_away(x):
    """fp32 rounded to bf16 away from zero, still as fp32."""
    bits = x.to(tl.uint32, bitcast=True)
    return ((bits + 0xFFFF) & 0xFFFF0000).to(tl.float32, bitcast=True)


@triton.jit
def bf16_towards(x):
    """fp32 rounded to bf16 towards zero, still as fp32."""
    return (x.to(tl.uint32, bitcast=True) & 0xFFFF0000).to(tl.float32, bitcast=True)


@triton.jit
def e4m3_codes(x, HAS_FP8: tl.constexpr):
    """The codes (uint8) of the nearest e4m3 numbers of fp32, ties to even; beyond the largest it, NaN stays."""
    if HAS_FP8:
        clamped = tl.clamp(x, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
        found = clamped.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        magnitude = tl.minimum(tl.abs(x), 448.0)
        bits = magnitude.to(tl.uint32, bitcast=True)
        # 20 bits of mantissa rounded away, and the bias of the exponent 120 lower.
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
        tiny = round_even(magnitude * 512.0).to(tl.uint32)  # steps of 2 ** -9 below 2 ** -6
        codes = tl.where(magnitude < 0.015625, tiny, normal)
        codes = tl.where(x != x, 127, codes) | ((x.to(tl.uint32, bitcast=True) >> 24) & 0x80)
        found = codes.to(tl.uint8)
    return found


@triton.jit
def e4m3_values(codes, HAS_FP8: tl.constexpr):
    """What codes (uint8) of e4m3 mean, exact in fp16."""
    if HAS_FP8:
        values = codes.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        wide = codes.to(tl.uint16)
        # Bits of exponent and mantissa in fp16's places are the number over 2 ** 8.
        shifted = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)
        values = tl.where((wide & 0x7F) == 0x7F, float("nan"), shifted * 256.0).to(tl.float16)
    return values
