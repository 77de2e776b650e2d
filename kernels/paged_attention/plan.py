"""How a step's attention is cut into dense pieces: decided once per step, used by every layer.

Queries are cut into parts whose rows all see a context of the same bucket; parts of equal size and bucket form a group
that is computed at once. The bucket follows from a query's own context length alone, so the shape of its reductions,
and with it every rounding, never depends on neighbours or on how a prompt was cut into chunks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Int32 = NDArray[np.int32]

_UNIT = 64  # tokens: the smallest bucket
_MAX_SCORES = 1 << 24  # elements of one group's scores: 64 MiB in fp32


@dataclass(frozen=True, slots=True)
class ColderBlocks:
    """The blocks of a group that lie in one colder pool."""

    pool: int  # 0 is the first one after the hot
    places: Tensor  # [n] in the group's blocks
    blocks: Tensor  # [n] within the pool


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """B parts of N queries each over L context slots."""

    rows: Tensor | None  # [B * N] rows of the flattened batch; None: the first B * N in order
    part_count: int  # B
    query_count: int  # N
    row_count: int  # N * query heads per kv head, padded; a token's heads lie together
    context: int  # L
    blocks: Tensor  # [B * L / block size] of the hot pool; any where they are colder
    colder: Sequence[ColderBlocks]
    tail_start: int  # every row sees all slots before this one
    hidden: Tensor | None  # [B, row_count or 1, L - tail_start] bool: slots that a row must not see
    stale: Tensor | None  # [B, L - tail_start, 1] bool: slots that hold nothing of this sequence


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    groups: list[AttentionGroup]


@dataclass(frozen=True, slots=True)
class _Part:
    sequence: int
    first_row: int
    first_position: int
    count: int
    context: int  # bucket of every row
    tail_start: int  # end of the bucket before


def plan_attention(
    query_starts: Int32,
    context_lengths: Int32,
    block_tables: Int32,
    *,
    block_size: int,
    pool_starts: Sequence[int] = (),
    heads: int,
    kv_heads: int,
    pad_rows: Callable[[int], int] = lambda count: count,
    max_rows: int = 256,
    device: torch.device | None = None,
) -> AttentionPlan:
    """Plans S sequences: query_starts [S + 1], context_lengths [S] with this step, block_tables [S, any].

    A part has at most `max_rows` query rows over the heads that share keys (one token's, at least); `pad_rows` says to
    how many rows it is padded. `pool_starts` are the first block ids of each pool, hot first, then the end; where there
    is one pool it may be empty.
    """
    if len(query_starts) != len(context_lengths) + 1 or len(block_tables) != len(context_lengths):
        raise ValueError("query_starts, context_lengths and block_tables disagree about the number of sequences")
    shared = heads // kv_heads
    unit = math.lcm(_UNIT, block_size)
    grouped: dict[tuple[int, int], list[_Part]] = {}
    for part in _parts(query_starts, context_lengths, unit, max(1, max_rows // shared)):
        grouped.setdefault((part.count, part.context), []).append(part)
    groups: list[AttentionGroup] = []
    for (count, context), parts in grouped.items():
        row_count = pad_rows(count * shared)
        most = max(1, _MAX_SCORES // (kv_heads * row_count * context))
        for start in range(0, len(parts), most):
            taken = parts[start : start + most]
            groups.append(_group(taken, shared, row_count, block_tables, block_size, pool_starts, device))
    return AttentionPlan(groups)


def context_bucket(length: int, unit: int) -> tuple[int, int]:
    """The end of the bucket that a context of `length` tokens falls in, and the end of the one before.

    Buckets are one unit wide up to 8 units, then an eighth to a quarter of their start.
    """
    units = -(-length // unit)
    step = 1 << max(0, (units - 1).bit_length() - 3)
    end = -(-units // step) * step
    return end * unit, (end - step) * unit


def _parts(query_starts: Int32, context_lengths: Int32, unit: int, most: int) -> Iterator[_Part]:
    starts = query_starts.tolist()
    for sequence, end in enumerate(context_lengths.tolist()):
        row, last_row = starts[sequence], starts[sequence + 1]
        position = end - (last_row - row)
        if position < 0:
            raise ValueError(f"sequence {sequence} has {last_row - row} queries in a context of {end}")
        while row < last_row:
            context, tail_start = context_bucket(position + 1, unit)
            count = min(context - position, last_row - row, most)
            yield _Part(sequence, row, position, count, context, tail_start)
            row, position = row + count, position + count


def _group(
    parts: list[_Part],
    shared: int,
    row_count: int,
    block_tables: Int32,
    block_size: int,
    pool_starts: Sequence[int],
    device: torch.device | None,
) -> AttentionGroup:
    first = parts[0]
    count, context, tail_start = first.count, first.context, first.tail_start
    rows = np.array([part.first_row for part in parts])[:, None] + np.arange(count)
    width = context // block_size
    table = np.zeros((len(parts), width), np.int64)
    listed = block_tables[[part.sequence for part in parts], :width]
    table[:, : listed.shape[1]] = listed
    blocks = table.reshape(-1)
    colder = list(_colder(blocks, pool_starts))
    positions = np.array([part.first_position for part in parts])[:, None]
    slots = np.arange(tail_start, context)
    # Padding rows see what the last token sees; nobody reads them.
    tokens = np.minimum(np.arange(row_count) // shared, count - 1) if count > 1 else np.zeros(1, np.int64)
    hidden = slots > (positions + tokens)[:, :, None]
    stale = (slots >= positions + count)[:, :, None]

    def put(array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(device)

    return AttentionGroup(
        rows=None if np.array_equal(rows.reshape(-1), np.arange(rows.size)) else put(rows.reshape(-1)),
        part_count=len(parts),
        query_count=count,
        row_count=row_count,
        context=context,
        blocks=put(np.where(blocks < pool_starts[1], blocks, 0) if colder else blocks),
        colder=[ColderBlocks(pool, put(places), put(found)) for pool, places, found in colder],
        tail_start=tail_start,
        hidden=put(hidden) if hidden.any() else None,
        stale=put(stale) if stale.any() else None,
    )


def _colder(
    blocks: NDArray[np.int64], pool_starts: Sequence[int]
) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.int64]]]:
    """Each colder pool that some of these block ids [n] are of, their places and their ids within the pool."""
    for pool, (start, end) in enumerate(itertools.pairwise(pool_starts[1:])):
        places = np.flatnonzero((blocks >= start) & (blocks < end))
        if len(places):
            yield pool, places, blocks[places] - start
