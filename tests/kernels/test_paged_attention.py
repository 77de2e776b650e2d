"""Paged attention against a plain float64 loop; every slot that no sequence wrote holds NaN."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from kernels.kv_write import kv_write
from kernels.paged_attention import paged_attention, plan_attention
from kernels.paged_attention.plan import context_bucket

BUDGET = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@dataclass
class Case:
    """Sequences as (queries, context), over one poisoned cache."""

    sequences: list[tuple[int, int]]
    heads: int = 6
    kv_heads: int = 2
    width: int = 20
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    seed: int = 0

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        needed = [-(-context // self.block_size) for _, context in self.sequences]
        order = torch.randperm(sum(needed) + 3, generator=generator).tolist()
        shape = (2 * self.kv_heads, len(order), self.block_size, self.width)
        self.cache = torch.full(shape, float("nan"), dtype=self.dtype)
        self.tables = np.zeros((len(needed), max(needed)), np.int32)
        self.keys, self.values = [], []
        for i, (_, context) in enumerate(self.sequences):
            blocks = [order.pop() for _ in range(needed[i])]
            self.tables[i, : len(blocks)] = blocks
            keys_values = torch.randn(context, 2 * self.kv_heads, self.width, generator=generator).to(self.dtype)
            at = torch.arange(context)
            slots = torch.tensor(blocks)[at // self.block_size] * self.block_size + at % self.block_size
            kv_write(self.cache, keys_values, slots)
            self.keys.append(keys_values[:, : self.kv_heads].double())
            self.values.append(keys_values[:, self.kv_heads :].double())
        self.starts = np.cumsum([0] + [queries for queries, _ in self.sequences]).astype(np.int32)
        self.queries = torch.randn(int(self.starts[-1]), self.heads, self.width, generator=generator)

    def run(self) -> torch.Tensor:
        plan = plan_attention(
            self.starts,
            np.array([context for _, context in self.sequences], np.int32),
            self.tables,
            block_size=self.block_size,
            heads=self.heads,
            kv_heads=self.kv_heads,
            pad_rows=lambda count: -(-count // 4) * 4,
        )
        return paged_attention(self.queries, self.cache, plan, 1 / math.sqrt(self.width))

    def expected(self) -> torch.Tensor:
        rows = []
        for i, (queries, context) in enumerate(self.sequences):
            for offset in range(queries):
                q = self.queries[self.starts[i] + offset].double()
                seen = context - queries + offset + 1
                heads = []
                for head in range(self.heads):
                    kv_head = head // (self.heads // self.kv_heads)
                    scores = self.keys[i][:seen, kv_head] @ q[head] / math.sqrt(self.width)
                    heads.append(torch.softmax(scores, 0) @ self.values[i][:seen, kv_head])
                rows.append(torch.cat(heads))
        return torch.stack(rows)


@pytest.mark.parametrize(
    "case",
    [
        Case([(1, 1)]),
        Case([(63, 63)], heads=4, kv_heads=4, width=60),
        Case([(1, 64), (1, 65), (1, 1), (1, 129), (1, 64)]),
        Case([(5, 70), (1, 33), (100, 100), (1, 500), (17, 300)]),
        Case([(1, 200), (3, 66)], heads=9, kv_heads=3, width=100, block_size=7),
        Case([(40, 40), (40, 40)], heads=8, kv_heads=1, block_size=32),
        Case([(2, 2), (1, 600)], heads=1, kv_heads=1, width=2, block_size=1),
    ],
    ids=lambda case: f"{case.sequences}-{case.heads}/{case.kv_heads}x{case.width}-{case.block_size}",
)
@pytest.mark.parametrize("dtype", BUDGET)
def test_matches_float64(case: Case, dtype: torch.dtype) -> None:
    case = Case(case.sequences, case.heads, case.kv_heads, case.width, case.block_size, dtype)
    found = case.run()
    assert bool(found.isfinite().all())
    torch.testing.assert_close(found.double(), case.expected(), rtol=BUDGET[dtype], atol=BUDGET[dtype])


def test_nan_of_one_sequence_stays_with_it() -> None:
    case = Case([(1, 70), (1, 70), (3, 90)])
    clean = case.run()
    case.cache[:, case.tables[1, 0]] = float("nan")
    found = case.run()
    assert bool(found[1].isnan().all())
    assert torch.equal(found[[0, 2, 3, 4]], clean[[0, 2, 3, 4]])


def test_buckets_hold_their_lengths_and_follow_each_other() -> None:
    previous_end = 0
    for length in range(1, 5000):
        end, start = context_bucket(length, 64)
        assert start < length <= end
        assert start == previous_end or (start, end) == context_bucket(length - 1, 64)[::-1]
        assert end - start <= max(64, start // 4)
        if (start, end) != context_bucket(length + 1, 64)[::-1]:
            previous_end = end


def test_refuses_more_queries_than_context() -> None:
    with pytest.raises(ValueError, match="context of 2"):
        plan_attention(
            np.array([0, 3], np.int32),
            np.array([2], np.int32),
            np.zeros((1, 1), np.int32),
            block_size=16,
            heads=1,
            kv_heads=1,
        )
