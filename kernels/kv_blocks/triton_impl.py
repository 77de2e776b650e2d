"""Moves blocks word by word; a program moves one block's share of one layer and head."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

TILE = 1024


@triton.jit
def copy_kernel(pool, pairs, blocks, words, N: tl.constexpr):
    pair = tl.program_id(0)
    outer = tl.program_id(1).to(tl.int64) * blocks
    source = pool + (outer + tl.load(pairs + pair * 2)) * words
    destination = pool + (outer + tl.load(pairs + pair * 2 + 1)) * words
    for start in range(0, words, N):
        at = start + tl.arange(0, N)
        tl.store(destination + at, tl.load(source + at, mask=at < words, other=0), mask=at < words)


@triton.jit
def move_kernel(pool, packed, ids, blocks, words, block_words, first_word, TO_POOL: tl.constexpr, N: tl.constexpr):
    place = tl.program_id(0).to(tl.int64)
    outer = tl.program_id(1).to(tl.int64)
    inside = pool + (outer * blocks + tl.load(ids + place)) * words
    outside = packed + place * block_words + first_word + outer * words
    for start in range(0, words, N):
        at = start + tl.arange(0, N)
        if TO_POOL:
            tl.store(inside + at, tl.load(outside + at, mask=at < words, other=0), mask=at < words)
        else:
            tl.store(outside + at, tl.load(inside + at, mask=at < words, other=0), mask=at < words)


def copy(part: Tensor, pairs: Tensor) -> None:
    """Copies blocks of [A, blocks, words] by pairs [n, 2], none of which touches another."""
    outer, blocks, words = part.shape
    if len(pairs):
        copy_kernel[(len(pairs), outer)](
            part, pairs, blocks, words, N=min(TILE, triton.next_power_of_2(words)), num_warps=4
        )


def move(parts: Sequence[Tensor], packed: Tensor, ids: Tensor, *, to_pool: bool) -> None:
    """Between blocks of parts [A, blocks, words] and bytes [n, block bytes]."""
    if not len(ids):
        return
    words_of_all = packed.view(parts[0].dtype)
    first = 0
    for part in parts:
        outer, blocks, words = part.shape
        move_kernel[(len(ids), outer)](
            part, words_of_all, ids, blocks, words, words_of_all.shape[1], first, TO_POOL=to_pool,
            N=min(TILE, triton.next_power_of_2(words)), num_warps=4,
        )  # fmt: skip
        first += outer * words
