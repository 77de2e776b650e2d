"""Token t's keys and values go to slot slots[t]; slot s is entry s % block size of block s // block size."""

from __future__ import annotations

from torch import Tensor


def kv_write(cache: Tensor, keys_values: Tensor, slots: Tensor) -> None:
    """Writes keys_values [T, 2 * heads, D], keys first, into cache [2 * heads, blocks, block size, D].

    `slots` [T] int64 must be distinct. The cache's type may be narrower; values are rounded to it.
    """
    heads, blocks, size, width = cache.shape
    if keys_values.shape != (len(slots), heads, width):
        raise ValueError(f"kv_write of {list(keys_values.shape)} to {len(slots)} slots of {list(cache.shape)}")
    cache.view(heads, blocks * size, width).index_copy_(1, slots, keys_values.transpose(0, 1).to(cache.dtype))
