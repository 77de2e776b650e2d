"""What attention over a mixed batch is given: queries of any number per sequence, and blocks in several formats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.kv_write import NarrowBlocks

MAX_HEAD_SIZE = 256
MAX_COLDER_POOLS = 2
HOT_TYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn)


@dataclass(frozen=True, slots=True)
class MixedBatch:
    """S sequences with T queries in all, sequence after sequence; a sequence's queries are its newest tokens.

    The bounds size launches, so that one captured in a graph serves every batch within them.
    """

    query_starts: Tensor  # [S + 1] int32
    context_lengths: Tensor  # [S] int32, tokens with KV, those of the queries included
    block_tables: Tensor  # [S, any] int32, of any pool; entries beyond the context are not read
    most_queries: int  # of one sequence, or more
    longest_context: int  # or more


@dataclass(frozen=True, slots=True)
class PagedKv:
    """One layer's keys and values: a block id counts through the hot pool, then through the colder ones."""

    hot: Tensor  # [2 * kv heads, blocks, block size, D], keys first: fp32, fp16, bf16 or e4m3
    colder: Sequence[NarrowBlocks] = ()  # of one layer

    @property
    def pool_starts(self) -> tuple[int, ...]:
        """The first id of each pool, then the end of the last one."""
        starts = [0, self.hot.shape[1]]
        for pool in self.colder:
            starts.append(starts[-1] + pool.numbers.shape[-3])
        return tuple(starts)


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """How a layer attends."""

    scale: float  # of the products
    window: int = 0  # tokens that a query sees, itself included; 0: all before it
    soft_cap: float = 0.0  # scores become cap * tanh(score / cap); 0: they stay
    sinks: Tensor | None = None  # [heads] fp32: a score for each head that takes weight and adds no value


def check(queries: Tensor, kv: PagedKv, batch: MixedBatch, rule: AttentionRule) -> None:
    """Raises ValueError where the parts do not fit each other."""
    _, heads, width = queries.shape
    kv_heads = kv.hot.shape[0] // 2
    if kv.hot.dim() != 4 or kv.hot.shape[0] % 2 or heads % kv_heads or kv.hot.shape[3] != width:
        raise ValueError(f"attention of queries {list(queries.shape)} over blocks {list(kv.hot.shape)}")
    if not 0 < width <= MAX_HEAD_SIZE or queries.stride(2) != 1 or kv.hot.stride(3) != 1:
        raise ValueError(f"attention: a head size of {width}; up to {MAX_HEAD_SIZE} neighbouring numbers are possible")
    if kv.hot.dtype not in HOT_TYPES:
        raise ValueError(f"attention over hot blocks of {kv.hot.dtype}")
    if len(kv.colder) > MAX_COLDER_POOLS:
        raise ValueError(f"attention over {len(kv.colder)} colder pools; {MAX_COLDER_POOLS} are possible")
    for pool in kv.colder:
        expected = pool.numbers.shape[-3], kv.hot.shape[2], width // 2 if pool.format == "int4" else width
        if pool.numbers.dim() != 4 or pool.numbers.shape[1:] != expected or pool.numbers.shape[0] != kv.hot.shape[0]:
            raise ValueError(f"attention: {pool.format} blocks {list(pool.numbers.shape)} for {list(kv.hot.shape)}")
        if not all(part.is_contiguous() for part in (pool.numbers, pool.key_ranges, pool.value_ranges)):
            raise ValueError("attention: a colder pool is not contiguous")
    sequences = len(batch.context_lengths)
    if batch.query_starts.shape != (sequences + 1,) or len(batch.block_tables) != sequences:
        raise ValueError("query_starts, context_lengths and block_tables disagree about the number of sequences")
    for name in ("query_starts", "context_lengths", "block_tables"):
        if (part := getattr(batch, name)).dtype != torch.int32 or part.stride(-1) != 1:
            raise ValueError(f"attention: {name} is {part.dtype} with strides {part.stride()}, not int32 in a row")
    if rule.window < 0 or rule.soft_cap < 0:
        raise ValueError(f"attention: a window of {rule.window} and a cap of {rule.soft_cap}; neither is below 0")
    if rule.sinks is not None and (rule.sinks.shape != (heads,) or rule.sinks.dtype != torch.float32):
        raise ValueError(f"attention: sinks {list(rule.sinks.shape)} {rule.sinks.dtype} for {heads} heads")
