"""Rotates queries and keys by their positions and writes keys and values into paged memory, in one pass."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.rope_kv_write.reference import rope_kv_write_plainly

__all__ = ["rope_kv_write", "rope_kv_write_plainly"]


def rope_kv_write(qkv: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, slots: Tensor, hot: Tensor) -> None:
    """On a GPU: rotates the queries in qkv [T, heads + 2 * kv heads, D] in place, and writes rotated keys and values
    into hot blocks [2 * kv heads, blocks, block size, D] (fp32, fp16, bf16 or e4m3), rounded to their type.

    cos and sin [positions, R / 2] fp32 turn the pairs (i, i + R / 2); channels from R on stay. Token t is at
    positions[t] and goes to slots[t], both [T] int64, slot s being entry s % block size of block s // block size; a
    token whose slot is negative is left alone. ValueError where the parts do not fit each other.
    """
    if qkv.dim() != 3 or hot.dim() != 4 or hot.shape[0] % 2 or qkv.shape[1] <= hot.shape[0]:
        raise ValueError(f"rope_kv_write of {list(qkv.shape)} to {list(hot.shape)}")
    if qkv.shape[2] != hot.shape[3] or qkv.stride(2) != 1 or hot.stride(3) != 1:
        raise ValueError(f"rope_kv_write: heads of {qkv.shape[2]} to {hot.shape[3]} neighbouring numbers")
    if cos.shape != sin.shape or 2 * cos.shape[1] > qkv.shape[2] or not (cos.is_contiguous() and sin.is_contiguous()):
        raise ValueError(f"rope_kv_write by {list(cos.shape)} and {list(sin.shape)}")
    if (
        {positions.dtype, slots.dtype} != {torch.int64}
        or (len(qkv),) != positions.shape
        or slots.shape != positions.shape
    ):
        raise ValueError(f"rope_kv_write of {len(qkv)} tokens at {list(positions.shape)} to {list(slots.shape)}")
    from kernels.rope_kv_write import triton_impl

    triton_impl.rope_kv_write(qkv, cos, sin, positions, slots, hot)
