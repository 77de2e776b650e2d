"""Sequences over poisoned blocks in several formats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.kv_write import NarrowBlocks
from kernels.paged_attention import AttentionRule, MixedBatch, PagedKv


@dataclass
class Case:
    """Sequences as (queries, context) over hot blocks that hold NaN where no sequence wrote.

    `ages`: formats of colder pools. Full blocks then have each format in turn, the first stays hot.
    """

    sequences: Sequence[tuple[int, int]]
    heads: int = 4
    kv_heads: int = 2
    width: int = 20
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    hot_dtype: torch.dtype | None = None
    ages: tuple[str, ...] = ()
    seed: int = 0

    def build(self, device: torch.device) -> tuple[torch.Tensor, PagedKv, MixedBatch]:
        generator = torch.Generator().manual_seed(self.seed)
        needed = [-(-context // self.block_size) for _, context in self.sequences]
        total = sum(needed) + 3
        order = torch.randperm(total, generator=generator).tolist()
        size = self.block_size, self.width
        hot = torch.full((2 * self.kv_heads, total, *size), float("nan"))
        pools = [NarrowBlocks.zeros(age, (1, self.kv_heads, total, *size), torch.device("cpu")) for age in self.ages]
        for pool in pools:
            pool.key_ranges.fill_(float("nan"))
            pool.value_ranges.fill_(float("nan"))
        tables = torch.full((len(needed), max(needed) + 2), 1 << 30, dtype=torch.int32)
        for i, (_, context) in enumerate(self.sequences):
            for j in range(needed[i]):
                place, filled = order.pop(), min(self.block_size, context - j * self.block_size)
                part = torch.randn(2 * self.kv_heads, filled, self.width, generator=generator)
                age = j % (len(pools) + 1) if filled == self.block_size else 0
                if age:
                    pools[age - 1].write(place, part[None])
                else:
                    hot[:, place, :filled] = part
                tables[i, j] = place + age * total
        starts = torch.tensor([0] + [queries for queries, _ in self.sequences]).cumsum(0).to(torch.int32)
        queries = torch.randn(int(starts[-1]), self.heads, self.width, generator=generator).to(self.dtype)
        kv = PagedKv(
            hot.to(self.hot_dtype or self.dtype).to(device),
            [
                NarrowBlocks(
                    pool.format, *(part[0].to(device) for part in (pool.numbers, pool.key_ranges, pool.value_ranges))
                )
                for pool in pools
            ],
        )
        contexts = torch.tensor([context for _, context in self.sequences], dtype=torch.int32)
        batch = MixedBatch(
            starts.to(device), contexts.to(device), tables.to(device),
            most_queries=max(queries for queries, _ in self.sequences),
            longest_context=int(contexts.max()) + 5,
        )  # fmt: skip
        return queries.to(device), kv, batch

    @property
    def rule(self) -> AttentionRule:
        return AttentionRule(scale=self.width**-0.5)
