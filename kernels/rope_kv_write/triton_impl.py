"""A program turns some heads of one token and writes where they belong."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.device import gpu_of
from kernels.gpu.numbers import e4m3_codes


@triton.jit
def to_stored(x, pool, HAS_FP8: tl.constexpr):
    """fp32 as the type of the blocks."""
    if pool.dtype.element_ty == tl.uint8:
        stored = e4m3_codes(x, HAS_FP8)
    else:
        stored = x.to(pool.dtype.element_ty)
    return stored


@triton.jit
def rope_kv_write_kernel(
    qkv, cos, sin, positions, slots, hot, heads, kv_heads, block_size,
    stride_token, stride_head, stride_hot_head, stride_block, stride_slot,
    TURNED: tl.constexpr, HEAD_SIZE: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
    HAS_FP8: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    is_query = head < heads
    is_written = (head >= heads) & (head < heads + 2 * kv_heads)
    turns = head < heads + kv_heads
    source = qkv + token * stride_token + head[:, None].to(tl.int64) * stride_head
    block = slot // block_size
    place = block * stride_block + (slot - block * block_size) * stride_slot
    target = hot + place + (head - heads)[:, None].to(tl.int64) * stride_hot_head
    if TURNED > 0:
        i = tl.arange(0, HALF)
        is_pair = i < TURNED // 2
        at = tl.load(positions + token) * (TURNED // 2) + i
        c = tl.where(turns[:, None], tl.load(cos + at, mask=is_pair, other=0)[None, :], 1.0)
        s = tl.where(turns[:, None], tl.load(sin + at, mask=is_pair, other=0)[None, :], 0.0)
        mask = (is_query | is_written)[:, None] & is_pair[None, :]
        first = tl.load(source + i[None, :], mask=mask, other=0).to(tl.float32)
        second = tl.load(source + TURNED // 2 + i[None, :], mask=mask, other=0).to(tl.float32)
        low = first * c - second * s
        high = second * c + first * s
        query_mask = is_query[:, None] & is_pair[None, :]
        tl.store(source + i[None, :], low.to(qkv.dtype.element_ty), mask=query_mask)
        tl.store(source + TURNED // 2 + i[None, :], high.to(qkv.dtype.element_ty), mask=query_mask)
        kv_mask = is_written[:, None] & is_pair[None, :]
        tl.store(target + i[None, :], to_stored(low, hot, HAS_FP8), mask=kv_mask)
        tl.store(target + TURNED // 2 + i[None, :], to_stored(high, hot, HAS_FP8), mask=kv_mask)
    if REST > 0:
        d = TURNED + tl.arange(0, REST)
        rest_mask = is_written[:, None] & (d < HEAD_SIZE)[None, :]
        rest = tl.load(source + d[None, :], mask=rest_mask, other=0).to(tl.float32)
        tl.store(target + d[None, :], to_stored(rest, hot, HAS_FP8), mask=rest_mask)


def rope_kv_write(qkv: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, slots: Tensor, hot: Tensor) -> None:
    """As kernels.rope_kv_write.rope_kv_write, which has checked the arguments."""
    tokens, all_heads, width = qkv.shape
    if not tokens:
        return
    turned, kv_heads, each = 2 * cos.shape[1], hot.shape[0] // 2, 16
    stored = hot.view(torch.uint8) if hot.dtype == torch.float8_e4m3fn else hot
    rope_kv_write_kernel[(tokens, triton.cdiv(all_heads, each))](
        qkv, cos, sin, positions, slots, stored, all_heads - 2 * kv_heads, kv_heads, hot.shape[2],
        qkv.stride(0), qkv.stride(1), stored.stride(0), stored.stride(1), stored.stride(2),
        TURNED=turned, HEAD_SIZE=width, HEADS=each, HALF=triton.next_power_of_2(max(turned // 2, 1)),
        REST=triton.next_power_of_2(width - turned) if width > turned else 0, HAS_FP8=gpu_of(qkv.device).has_fp8,
        num_warps=4,
    )  # fmt: skip
