"""Rewrites blocks in colder formats, layouts of kernels/kv_write/narrow.py. Heads come in halves, as int4 packs them.

A program rewrites keys and values of one block, layer and kv head.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.device import gpu_of
from kernels.gpu.numbers import bf16_away, bf16_towards, e4m3_codes, e4m3_values, round_even
from kernels.kv_write import NarrowBlocks


@triton.jit
def read_half(
    numbers, ranges, of_numbers, of_ranges, tokens, channels, mask, start,
    FORMAT: tl.constexpr, IS_KEY: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HAS_FP8: tl.constexpr,
):  # fmt: skip
    """fp32 [T, D / 2] of a block: channels from `start` (0 or half the head) on."""
    half: tl.constexpr = HEAD_SIZE // 2
    at = of_numbers * BLOCK_SIZE + tokens[:, None]
    if FORMAT == "int4":
        pairs = tl.load(numbers + at * half + channels[None, :], mask=mask, other=0)
        x = ((pairs >> tl.where(start > 0, 4, 0)) & 15).to(tl.float32)
    else:
        stored = tl.load(numbers + at * HEAD_SIZE + start + channels[None, :], mask=mask, other=0)
        if stored.dtype == tl.uint8:
            x = e4m3_values(stored, HAS_FP8).to(tl.float32)
        else:
            x = stored.to(tl.float32)
    if FORMAT != "hot":
        parts: tl.constexpr = 2 if FORMAT == "int4" else 1
        if IS_KEY:
            here = ranges + of_ranges * parts * HEAD_SIZE + start + channels[None, :]
        else:
            here = ranges + (of_ranges * BLOCK_SIZE + tokens[:, None]) * parts
        x = x * tl.load(here, mask=mask, other=0).to(tl.float32)
        if FORMAT == "int4":
            x = x + tl.load(here + (HEAD_SIZE if IS_KEY else 1), mask=mask, other=0).to(tl.float32)
    return x


@triton.jit
def spread(lowest, highest, greatest, FORMAT: tl.constexpr):
    """Scale and minimum of numbers between `lowest` and `highest`, of magnitudes up to `greatest`."""
    if FORMAT == "int4":
        minimum = tl.where(lowest < 0, bf16_away(lowest), bf16_towards(lowest))
        scale = bf16_away(tl.div_rn(highest - minimum, 15.0))
    else:
        most: tl.constexpr = 127.0 if FORMAT == "int8" else 448.0
        minimum = greatest * 0.0
        scale = bf16_away(tl.div_rn(greatest, most))
    return scale, minimum


@triton.jit
def codes_of(x, scale, minimum, FORMAT: tl.constexpr, HAS_FP8: tl.constexpr):
    """Numbers as codes of the format: int8, or uint8."""
    divided = tl.div_rn(x - minimum, tl.where(scale > 0, scale, 1.0))
    if FORMAT == "int4":
        codes = tl.where(scale > 0, round_even(tl.minimum(tl.maximum(divided, 0.0), 15.0)), 0.0).to(tl.uint8)
    elif FORMAT == "int8":
        codes = tl.where(scale > 0, round_even(tl.minimum(tl.maximum(divided, -127.0), 127.0)), 0.0).to(tl.int8)
    else:
        codes = e4m3_codes(divided, HAS_FP8)
    return codes


@triton.jit
def store_codes(numbers, of_numbers, tokens, channels, mask, low, high, FORMAT: tl.constexpr, HEAD_SIZE: tl.constexpr,
                BLOCK_SIZE: tl.constexpr):  # fmt: skip
    half: tl.constexpr = HEAD_SIZE // 2
    at = of_numbers * BLOCK_SIZE + tokens[:, None]
    if FORMAT == "int4":
        tl.store(numbers + at * half + channels[None, :], low | (high << 4), mask=mask)
    else:
        tl.store(numbers + at * HEAD_SIZE + channels[None, :], low, mask=mask)
        tl.store(numbers + at * HEAD_SIZE + half + channels[None, :], high, mask=mask)


@triton.jit
def demote_kernel(
    target, target_key_ranges, target_value_ranges, source, source_key_ranges, source_value_ranges, pairs,
    source_blocks, target_blocks, kv_heads,
    SOURCE: tl.constexpr, TARGET: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr, CHANNELS: tl.constexpr, HAS_FP8: tl.constexpr,
):  # fmt: skip
    half: tl.constexpr = HEAD_SIZE // 2
    parts: tl.constexpr = 2 if TARGET == "int4" else 1
    from_block = tl.load(pairs + tl.program_id(0) * 2)
    to_block = tl.load(pairs + tl.program_id(0) * 2 + 1)
    layer_head = tl.program_id(1).to(tl.int64)
    key_head = layer_head // kv_heads * 2 * kv_heads + layer_head % kv_heads
    value_head = key_head + kv_heads
    from_ranges = layer_head * source_blocks + from_block
    to_ranges = layer_head * target_blocks + to_block
    t = tl.arange(0, TOKENS)
    c = tl.arange(0, CHANNELS)
    mask = (t < BLOCK_SIZE)[:, None] & (c < half)[None, :]

    # Keys: a range for each channel.
    at = key_head * source_blocks + from_block
    low = read_half(source, source_key_ranges, at, from_ranges, t, c, mask, 0, SOURCE, True, HEAD_SIZE, BLOCK_SIZE,
                    HAS_FP8)  # fmt: skip
    high = read_half(source, source_key_ranges, at, from_ranges, t, c, mask, half, SOURCE, True, HEAD_SIZE, BLOCK_SIZE,
                     HAS_FP8)  # fmt: skip
    low_scale, low_minimum = spread(
        tl.min(tl.where(mask, low, float("inf")), 0), tl.max(tl.where(mask, low, float("-inf")), 0),
        tl.max(tl.abs(low), 0), TARGET,
    )  # fmt: skip
    high_scale, high_minimum = spread(
        tl.min(tl.where(mask, high, float("inf")), 0), tl.max(tl.where(mask, high, float("-inf")), 0),
        tl.max(tl.abs(high), 0), TARGET,
    )  # fmt: skip
    store_codes(
        target, key_head * target_blocks + to_block, t, c, mask,
        codes_of(low, low_scale[None, :], low_minimum[None, :], TARGET, HAS_FP8),
        codes_of(high, high_scale[None, :], high_minimum[None, :], TARGET, HAS_FP8), TARGET, HEAD_SIZE, BLOCK_SIZE,
    )  # fmt: skip
    ranges = target_key_ranges + to_ranges * parts * HEAD_SIZE + c
    tl.store(ranges, low_scale.to(tl.bfloat16), mask=c < half)
    tl.store(ranges + half, high_scale.to(tl.bfloat16), mask=c < half)
    if TARGET == "int4":
        tl.store(ranges + HEAD_SIZE, low_minimum.to(tl.bfloat16), mask=c < half)
        tl.store(ranges + HEAD_SIZE + half, high_minimum.to(tl.bfloat16), mask=c < half)

    # Values: a range for each token.
    at = value_head * source_blocks + from_block
    low = read_half(source, source_value_ranges, at, from_ranges, t, c, mask, 0, SOURCE, False, HEAD_SIZE, BLOCK_SIZE,
                    HAS_FP8)  # fmt: skip
    high = read_half(source, source_value_ranges, at, from_ranges, t, c, mask, half, SOURCE, False, HEAD_SIZE,
                     BLOCK_SIZE, HAS_FP8)  # fmt: skip
    scale, minimum = spread(
        tl.min(tl.where(mask, tl.minimum(low, high), float("inf")), 1),
        tl.max(tl.where(mask, tl.maximum(low, high), float("-inf")), 1),
        tl.max(tl.maximum(tl.abs(low), tl.abs(high)), 1), TARGET,
    )  # fmt: skip
    store_codes(
        target, value_head * target_blocks + to_block, t, c, mask,
        codes_of(low, scale[:, None], minimum[:, None], TARGET, HAS_FP8),
        codes_of(high, scale[:, None], minimum[:, None], TARGET, HAS_FP8), TARGET, HEAD_SIZE, BLOCK_SIZE,
    )  # fmt: skip
    ranges = target_value_ranges + (to_ranges * BLOCK_SIZE + t) * parts
    tl.store(ranges, scale.to(tl.bfloat16), mask=t < BLOCK_SIZE)
    if TARGET == "int4":
        tl.store(ranges + 1, minimum.to(tl.bfloat16), mask=t < BLOCK_SIZE)


def demote(source: Tensor | NarrowBlocks, target: NarrowBlocks, pairs: Tensor) -> None:
    """As kernels.kv_blocks.demote_blocks, which has checked the arguments; pairs [n, 2] int64 on the device."""
    if not len(pairs):
        return
    layers, heads, blocks, size, _ = target.numbers.shape
    width = target.key_ranges.shape[4]
    if isinstance(source, torch.Tensor):
        is_e4m3 = source.dtype == torch.float8_e4m3fn
        numbers, format_, ranges = (source.view(torch.uint8) if is_e4m3 else source), "hot", [source, source]
        ranges = [numbers, numbers]
    else:
        numbers, format_, ranges = source.numbers, source.format, [source.key_ranges, source.value_ranges]
    demote_kernel[(len(pairs), layers * (heads // 2))](
        target.numbers, target.key_ranges, target.value_ranges, numbers, *ranges, pairs, numbers.shape[2], blocks,
        heads // 2, SOURCE=format_, TARGET=target.format, HEAD_SIZE=width, BLOCK_SIZE=size,
        TOKENS=triton.next_power_of_2(size), CHANNELS=triton.next_power_of_2(width // 2),
        HAS_FP8=gpu_of(numbers.device).has_fp8, num_warps=4,
    )  # fmt: skip
