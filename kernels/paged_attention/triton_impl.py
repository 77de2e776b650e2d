"""Attention over a mixed batch in Triton: prefill chunks over a paged prefix, decodes and drafts by one kernel.

A program computes a few neighbouring queries of one sequence, for all heads that share a kv head, over one split of the
context or all of it. Tiles and splits begin at multiples of their size, so a row's sums never depend on which other
rows its program has, or on whether splits are computed by one program (`chain`) or by several (`part`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.device import Gpu, gpu_of
from kernels.gpu.tuned import tuned
from kernels.paged_attention.mixed import AttentionRule, MixedBatch, PagedKv
from kernels.paged_attention.triton_read import read_tile

LOG2_E = tl.constexpr(1.4426950408889634)
STEPWISE = ("sequences", "split_count")
"""Arguments that differ from step to step: compiled once, whatever they are, so that no step waits for a compiler."""


@triton.jit
def find_sequence(query_starts, sequences, place, QUERIES: tl.constexpr):
    """The last sequence whose first program is not after `place`: it has one for each QUERIES queries, and one more.

    QUERIES 0: whose first row is not after `place`.
    """
    low = 0
    high = sequences
    while high - low > 1:
        middle = (low + high) // 2
        first = tl.load(query_starts + middle)
        if QUERIES > 0:
            first = first // QUERIES + middle
        if first <= place:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def merge(top, total, mixed, top2, total2, mixed2):
    """Joins two parts of a context: greatest scores [M], sums of weights [M], weighted values [M, D].

    Multiplications and additions are fused as written here, wherever this is inlined.
    """
    joined = tl.maximum(top, top2)
    base = tl.where(joined == float("-inf"), 0.0, joined)
    old = tl.exp2(top - base)
    new = tl.exp2(top2 - base)
    total = tl.fma(total2, new, total * old)
    mixed = tl.fma(mixed2, tl.broadcast_to(new[:, None], mixed.shape), mixed * old[:, None])
    return joined, total, mixed


@triton.jit(do_not_specialize=STEPWISE)
def attention_kernel(
    out, mixed_parts, sum_parts, queries, hot,
    warm, warm_key_ranges, warm_value_ranges, cold, cold_key_ranges, cold_value_ranges,
    query_starts, context_lengths, block_tables, sinks,
    sequences, scale, soft_cap, window, split_size, split_count,
    warm_start, warm_count, cold_start, cold_count,
    stride_token, stride_query_head, stride_head, stride_block, stride_slot, stride_table,
    WARM: tl.constexpr, COLD: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    MODE: tl.constexpr, KV_HEADS: tl.constexpr, SHARED: tl.constexpr, HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, QUERIES: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr,
    HAS_FP8: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0)
    kv_head = tl.program_id(1)
    sequence = find_sequence(query_starts, sequences, place, QUERIES)
    first_row = tl.load(query_starts + sequence)
    count = tl.load(query_starts + sequence + 1) - first_row
    first_query = (place - first_row // QUERIES - sequence) * QUERIES
    if first_query >= count:
        return
    context = tl.load(context_lengths + sequence)

    # Rows: query after query, the heads that share keys together.
    m = tl.arange(0, ROWS)
    query = first_query + m // SHARED
    head = kv_head * SHARED + m % SHARED
    is_row = (m < QUERIES * SHARED) & (query < count)
    row = (first_row + query).to(tl.int64)
    position = context - count + query
    d = tl.arange(0, WIDTH)
    is_channel = d < HEAD_SIZE
    q = tl.load(
        queries + row[:, None] * stride_token + head[:, None] * stride_query_head + d[None, :],
        mask=is_row[:, None] & is_channel[None, :], other=0,
    )  # fmt: skip

    end = context - count + tl.minimum(first_query + QUERIES, count)
    begin = 0
    if HAS_WINDOW:
        begin = tl.maximum(context - count + first_query + 1 - window, 0) // TILE * TILE
    if MODE == "part":
        split = tl.program_id(2)
        if (split * split_size >= end) | ((split + 1) * split_size <= begin):
            return
        first_split = split
        last_split = split + 1
    else:
        first_split = begin // split_size
        last_split = tl.cdiv(end, split_size)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if HAS_SINKS and MODE != "part":
        top = tl.load(sinks + head, mask=is_row, other=0) * LOG2_E
        total = tl.full([ROWS], 1.0, tl.float32)
    mixed = tl.zeros([ROWS, WIDTH], tl.float32)
    for number in range(first_split, last_split):
        if MODE == "chain":
            split_top = tl.full([ROWS], float("-inf"), tl.float32)
            split_total = tl.zeros([ROWS], tl.float32)
            split_mixed = tl.zeros([ROWS, WIDTH], tl.float32)
        else:
            split_top, split_total, split_mixed = top, total, mixed
        for start in range(tl.maximum(begin, number * split_size), tl.minimum(end, (number + 1) * split_size), TILE):
            n = start + tl.arange(0, TILE)
            is_token = n < end
            blocks = tl.load(block_tables + sequence.to(tl.int64) * stride_table + n // BLOCK_SIZE, is_token, other=0)
            slots = n % BLOCK_SIZE
            mask = is_token[:, None] & is_channel[None, :]
            keys = read_tile(
                hot, warm, warm_key_ranges, cold, cold_key_ranges, kv_head, kv_head,
                warm_start, warm_count, cold_start, cold_count, blocks, slots, d, mask,
                stride_head, stride_block, stride_slot,
                WARM, COLD, True, BLOCK_SIZE, HEAD_SIZE, HAS_FP8, q.dtype,
            )  # fmt: skip
            scores = tl.dot(q, tl.trans(keys), input_precision=PRECISION) * scale
            if HAS_CAP:
                scores = soft_cap - 2.0 * soft_cap / (tl.exp2(scores * (2.0 * LOG2_E / soft_cap)) + 1.0)
            is_seen = n[None, :] <= position[:, None]
            if HAS_WINDOW:
                is_seen = is_seen & (n[None, :] > position[:, None] - window)
            scores = tl.where(is_seen, scores * LOG2_E, float("-inf"))
            joined = tl.maximum(split_top, tl.max(scores, 1))
            base = tl.where(joined == float("-inf"), 0.0, joined)
            weights = tl.exp2(scores - base[:, None])
            shrink = tl.exp2(split_top - base)
            values = read_tile(
                hot, warm, warm_value_ranges, cold, cold_value_ranges, kv_head + KV_HEADS, kv_head,
                warm_start, warm_count, cold_start, cold_count, blocks, slots, d, mask,
                stride_head, stride_block, stride_slot,
                WARM, COLD, False, BLOCK_SIZE, HEAD_SIZE, HAS_FP8, q.dtype,
            )  # fmt: skip
            split_total = split_total * shrink + tl.sum(weights, 1)
            split_mixed = split_mixed * shrink[:, None]
            split_mixed = tl.dot(weights.to(q.dtype), values, split_mixed, input_precision=PRECISION)
            split_top = joined
        if MODE == "chain":
            top, total, mixed = merge(top, total, mixed, split_top, split_total, split_mixed)
        else:
            top, total, mixed = split_top, split_total, split_mixed

    is_stored = is_row[:, None] & is_channel[None, :]
    of_head = row * (KV_HEADS * SHARED) + head
    if MODE == "part":
        at = of_head * split_count + tl.program_id(2)
        tl.store(mixed_parts + at[:, None] * HEAD_SIZE + d[None, :], mixed, mask=is_stored)
        tl.store(sum_parts + at * 2, top, mask=is_row)
        tl.store(sum_parts + at * 2 + 1, total, mask=is_row)
    else:
        result = mixed / total[:, None]
        tl.store(out + of_head[:, None] * HEAD_SIZE + d[None, :], result.to(out.dtype.element_ty), mask=is_stored)


@triton.jit(do_not_specialize=STEPWISE)
def merge_kernel(
    out, mixed_parts, sum_parts, query_starts, context_lengths, sinks, sequences, window, split_size, split_count,
    HAS_WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr, HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Joins the splits of one query and head, in their order."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    sequence = find_sequence(query_starts, sequences, row, 0)
    end_row = tl.load(query_starts + sequence + 1)
    if row >= end_row:
        return
    end = tl.load(context_lengths + sequence) - (end_row - row) + 1
    first_split = 0
    if HAS_WINDOW:
        first_split = tl.maximum(end - window, 0) // split_size
    d = tl.arange(0, WIDTH)
    is_channel = (d < HEAD_SIZE)[None, :]
    top = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    if HAS_SINKS:
        top = tl.load(sinks + head + tl.zeros([1], tl.int32)) * LOG2_E
        total = tl.full([1], 1.0, tl.float32)
    mixed = tl.zeros([1, WIDTH], tl.float32)
    of_head = row.to(tl.int64) * HEADS + head
    for split in range(first_split, tl.cdiv(end, split_size)):
        at = (of_head * split_count + split) + tl.zeros([1], tl.int64)
        split_mixed = tl.load(mixed_parts + at[:, None] * HEAD_SIZE + d[None, :], mask=is_channel, other=0)
        split_top = tl.load(sum_parts + at * 2)
        split_total = tl.load(sum_parts + at * 2 + 1)
        top, total, mixed = merge(top, total, mixed, split_top, split_total, split_mixed)
    result = (mixed / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + of_head * HEAD_SIZE + d[None, :], result, mask=is_channel)


@dataclass(frozen=True, slots=True)
class Config:
    """What may be tuned without changing more than rounding."""

    rows: int  # of a program: queries times heads that share a kv head
    tile: int  # tokens
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class Launch:
    """How a batch is cut into programs."""

    config: Config
    queries: int  # of a program
    places: int  # programs for queries
    split_size: int  # tokens
    split_count: int
    mode: str  # "whole": one split; "part": a program a split; "chain": a program goes through all splits


def mixed_attention(
    queries: Tensor, kv: PagedKv, batch: MixedBatch, rule: AttentionRule, fixed_split: int | None, out: Tensor
) -> None:
    """As kernels.paged_attention.mixed_attention, which has checked the arguments."""
    tokens, heads, width = queries.shape
    sequences, kv_heads, block_size = len(batch.context_lengths), kv.hot.shape[0] // 2, kv.hot.shape[2]
    if tokens == 0 or sequences == 0:
        return
    gpu = gpu_of(queries.device)
    launch = plan_launch(queries, kv_heads, batch, fixed_split, gpu)
    padded = max(16, triton.next_power_of_2(width))
    parts, sums = out, out  # unused unless a split is a program's own
    if launch.mode == "part":
        parts = queries.new_empty((tokens, heads, launch.split_count, width), dtype=torch.float32)
        sums = queries.new_empty((tokens, heads, launch.split_count, 2), dtype=torch.float32)
    pools = [part for pool in kv.colder for part in (pool.numbers, pool.key_ranges, pool.value_ranges)]
    starts = [*kv.pool_starts[1:-1], kv.pool_starts[-1], kv.pool_starts[-1]][:2]
    counts = [*(pool.numbers.shape[1] for pool in kv.colder), 0, 0][:2]
    formats = [*(pool.format for pool in kv.colder), "", ""][:2]
    hot = _codes(kv.hot)
    sinks = out if rule.sinks is None else rule.sinks
    attention_kernel[(launch.places, kv_heads, launch.split_count if launch.mode == "part" else 1)](
        out, parts, sums, queries, hot, *pools, *[out] * (6 - len(pools)),
        batch.query_starts, batch.context_lengths, batch.block_tables, sinks,
        sequences, rule.scale, rule.soft_cap, rule.window, launch.split_size, launch.split_count,
        starts[0], counts[0], starts[1], counts[1],
        queries.stride(0), queries.stride(1), hot.stride(0), hot.stride(1), hot.stride(2), batch.block_tables.stride(0),
        WARM=formats[0], COLD=formats[1], HAS_WINDOW=rule.window > 0, HAS_CAP=rule.soft_cap > 0,
        HAS_SINKS=rule.sinks is not None, MODE=launch.mode, KV_HEADS=kv_heads, SHARED=heads // kv_heads,
        HEAD_SIZE=width, BLOCK_SIZE=block_size, QUERIES=launch.queries, ROWS=launch.config.rows,
        TILE=launch.config.tile, WIDTH=padded, HAS_FP8=gpu.has_fp8,
        PRECISION="ieee" if queries.dtype == torch.float32 else "tf32",
        num_warps=launch.config.warps, num_stages=launch.config.stages,
    )  # fmt: skip
    if launch.mode == "part":
        merge_kernel[(tokens, heads)](
            out, parts, sums, batch.query_starts, batch.context_lengths, sinks, sequences, rule.window,
            launch.split_size, launch.split_count, HAS_WINDOW=rule.window > 0, HAS_SINKS=rule.sinks is not None,
            HEADS=heads, HEAD_SIZE=width, WIDTH=padded, num_warps=max(1, min(4, padded // 64)),
        )  # fmt: skip


def plan_launch(queries: Tensor, kv_heads: int, batch: MixedBatch, fixed_split: int | None, gpu: Gpu) -> Launch:
    """ValueError for a `fixed_split` that is no multiple of a tile.

    With it, programs have one shape whatever the batch, for instructions of other shapes may add in another order.
    """
    tokens, heads, width = queries.shape
    shared, sequences = heads // kv_heads, len(batch.context_lengths)
    needed = 64 if fixed_split else min(batch.most_queries * shared, 64)
    default = Config(
        rows=max(16, triton.next_power_of_2(max(needed, shared))),
        tile=32 if width > 128 or queries.element_size() > 2 else 64,
        warps=4,
        stages=2 if width > 128 or queries.element_size() > 2 else 3,
    )
    shape = {
        "head_size": width,
        "shared": shared,
        "rows": 0 if fixed_split else needed,
        "fixed": int(bool(fixed_split)),
    }
    config = tuned("paged_attention", gpu, default, shape)
    each = config.rows // shared
    if each == 0:
        raise ValueError(f"attention: programs of {config.rows} rows for {shared} heads of one kv head")
    places = tokens // each + sequences
    longest = max(batch.longest_context, 1)
    if fixed_split:
        if fixed_split % config.tile:
            raise ValueError(f"attention: splits of {fixed_split} tokens are no multiples of {config.tile}")
        count = -(-longest // fixed_split)
        # Where queries alone keep the GPU busy, parts would only cost memory. The result is the same.
        mode = "part" if count > 1 and places * kv_heads < 2 * gpu.processors else "chain"
        return Launch(config, each, places, fixed_split, count, mode)
    wanted = -(-2 * gpu.processors // (places * kv_heads))
    tiles = -(-longest // config.tile)
    per_split = max(-(-tiles // wanted), min(4, tiles))
    count = -(-tiles // per_split)
    return Launch(config, each, places, per_split * config.tile, count, "part" if count > 1 else "whole")


def _codes(numbers: Tensor) -> Tensor:
    """e4m3 as its bits: GPUs that know no such type cannot even load it."""
    return numbers.view(torch.uint8) if numbers.dtype == torch.float8_e4m3fn else numbers
