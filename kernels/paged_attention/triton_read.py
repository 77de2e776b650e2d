"""Reads tiles of keys or values from blocks of each format; inlined into the attention kernel."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.gpu.numbers import e4m3_values


@triton.jit
def read_hot(pool, head, blocks, slots, d, mask, stride_head, stride_block, stride_slot, HAS_FP8: tl.constexpr):
    """[N, D] of a hot pool: slots [N] of blocks [N]. What is masked reads as 0. e4m3 blocks come as uint8."""
    at = head.to(tl.int64) * stride_head + blocks.to(tl.int64) * stride_block + slots * stride_slot
    x = tl.load(pool + at[:, None] + d[None, :], mask=mask, other=0)
    if pool.dtype.element_ty == tl.uint8:
        x = e4m3_values(x, HAS_FP8)
    return x


@triton.jit
def read_narrow(
    numbers, ranges, row_head, range_head, block_count, blocks, slots, d, mask,
    FORMAT: tl.constexpr, IS_KEY: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_SIZE: tl.constexpr,
    HAS_FP8: tl.constexpr,
):  # fmt: skip
    """[N, D] in fp32 of a colder pool; layouts in kernels/kv_write/narrow.py."""
    rows = (row_head.to(tl.int64) * block_count + blocks) * BLOCK_SIZE + slots
    if FORMAT == "int4":
        half: tl.constexpr = HEAD_SIZE // 2
        is_high = d >= half
        bytes_ = tl.load(numbers + rows[:, None] * half + tl.where(is_high, d - half, d)[None, :], mask=mask, other=0)
        x = ((bytes_ >> tl.where(is_high, 4, 0)[None, :]) & 15).to(tl.float32)
    else:
        codes = tl.load(numbers + rows[:, None] * HEAD_SIZE + d[None, :], mask=mask, other=0)
        if FORMAT == "fp8":
            x = e4m3_values(codes, HAS_FP8).to(tl.float32)
        else:
            x = codes.to(tl.float32)
    parts: tl.constexpr = 2 if FORMAT == "int4" else 1
    of_block = range_head.to(tl.int64) * block_count + blocks
    if IS_KEY:
        at = (of_block * parts * HEAD_SIZE)[:, None] + d[None, :]
        x *= tl.load(ranges + at, mask=mask, other=0).to(tl.float32)
        if FORMAT == "int4":
            x += tl.load(ranges + at + HEAD_SIZE, mask=mask, other=0).to(tl.float32)
    else:
        at = (of_block * BLOCK_SIZE + slots)[:, None] * parts
        x *= tl.load(ranges + at, mask=mask, other=0).to(tl.float32)
        if FORMAT == "int4":
            x += tl.load(ranges + at + 1, mask=mask, other=0).to(tl.float32)
    return x


@triton.jit
def read_tile(
    hot, warm, warm_ranges, cold, cold_ranges, head, kv_head, warm_start, warm_count, cold_start, cold_count,
    blocks, slots, d, mask, stride_head, stride_block, stride_slot,
    WARM: tl.constexpr, COLD: tl.constexpr, IS_KEY: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_SIZE: tl.constexpr,
    HAS_FP8: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """[N, D] in the type that is computed in, each row from the pool that its block id names."""
    is_hot = mask
    if WARM != "":
        is_hot = (blocks < warm_start)[:, None] & mask
    x = read_hot(hot, head, blocks, slots, d, is_hot, stride_head, stride_block, stride_slot, HAS_FP8).to(COMPUTE)
    if WARM != "":
        # Most tiles have blocks of one format: the others' are not even asked for.
        is_warm = (blocks >= warm_start) & (blocks < cold_start)
        if tl.max(is_warm.to(tl.int32), 0) > 0:
            warm_tile = read_narrow(
                warm, warm_ranges, head, kv_head, warm_count, blocks - warm_start, slots, d, is_warm[:, None] & mask,
                WARM, IS_KEY, BLOCK_SIZE, HEAD_SIZE, HAS_FP8,
            )  # fmt: skip
            x = tl.where(is_warm[:, None], warm_tile.to(COMPUTE), x)
        if COLD != "":
            is_cold = blocks >= cold_start
            if tl.max(is_cold.to(tl.int32), 0) > 0:
                cold_tile = read_narrow(
                    cold, cold_ranges, head, kv_head, cold_count, blocks - cold_start, slots, d,
                    is_cold[:, None] & mask, COLD, IS_KEY, BLOCK_SIZE, HEAD_SIZE, HAS_FP8,
                )  # fmt: skip
                x = tl.where(is_cold[:, None], cold_tile.to(COMPUTE), x)
    return x
