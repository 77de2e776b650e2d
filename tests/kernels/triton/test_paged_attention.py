"""Attention over mixed batches against float64; every slot that no sequence wrote holds NaN."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.paged_attention import AttentionRule, MixedBatch, mixed_attention
from kernels.paged_attention.plain import mixed_attention as plain_attention
from tests.kernels.triton.cases import Case
from tests.kernels.triton.conftest import DEVICE

BUDGET = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
"""Relative and absolute, of values drawn from a normal distribution; colder blocks are the same for both sides."""
TYPES = list(BUDGET) if DEVICE.type == "cuda" else [torch.float32, torch.float16]


def assert_right(case: Case, rule: AttentionRule, device: torch.device, fixed_split: int | None = None) -> None:
    queries, kv, batch = case.build(device)
    out = queries.new_full((queries.shape[0], case.heads * case.width), float("nan"))
    found = mixed_attention(queries, kv, batch, rule, fixed_split=fixed_split, out=out)
    budget = BUDGET[case.dtype]
    torch.testing.assert_close(found.double(), plain_attention(queries, kv, batch, rule), rtol=budget, atol=budget)


@pytest.mark.parametrize(
    "case",
    [
        Case([(1, 1)], heads=2, kv_heads=1),
        Case([(63, 63)], heads=2, kv_heads=2, width=60),
        Case([(1, 64), (1, 65), (1, 1), (1, 129)]),
        Case([(5, 70), (1, 33), (17, 100)], heads=6, dtype=torch.float16),
        Case([(1, 90), (3, 66)], heads=9, kv_heads=3, width=100, block_size=7),
        Case([(2, 2), (1, 100)], heads=1, kv_heads=1, width=2, block_size=1),
        Case([(3, 70)], heads=2, kv_heads=1, width=256, dtype=torch.float16),
        Case([(2, 70)], heads=2, kv_heads=1, hot_dtype=torch.float8_e4m3fn, dtype=torch.float16),
    ],
    ids=lambda case: f"{case.sequences}-{case.heads}/{case.kv_heads}x{case.width}-{case.block_size}",
)
def test_matches_float64(case: Case, device: torch.device) -> None:
    assert_right(case, case.rule, device)


@pytest.mark.parametrize("ages", [("int8",), ("fp8", "int4"), ("int8", "int4")], ids="-".join)
@pytest.mark.parametrize("dtype", TYPES)
def test_reads_each_block_in_its_format(ages: tuple[str, ...], dtype: torch.dtype, device: torch.device) -> None:
    case = Case([(1, 97), (4, 66)], width=24, dtype=dtype, ages=ages)
    assert_right(case, case.rule, device)


@pytest.mark.parametrize("fixed_split", [None, 32], ids=["any split", "fixed split"])
def test_window_cap_and_sinks(fixed_split: int | None, device: torch.device) -> None:
    case = Case([(1, 120), (9, 70), (4, 4)], width=32)
    sinks = torch.randn(case.heads, generator=torch.Generator().manual_seed(1)).to(device)
    for rule in (
        AttentionRule(0.3, window=40),
        AttentionRule(0.3, soft_cap=2.0),
        AttentionRule(0.3, window=1, soft_cap=5.0, sinks=sinks),
        AttentionRule(0.3, sinks=sinks),
    ):
        assert_right(case, rule, device, fixed_split)


def test_fixed_splits_make_rows_independent_of_their_batch(device: torch.device) -> None:
    """One program for all splits and one a split, a chunk and its tokens alone: the same bits."""
    case = Case([(24, 110), (1, 80)], heads=2, kv_heads=1, width=16, ages=("int8",))
    queries, kv, batch = case.build(device)
    rule = AttentionRule(0.25, window=50)
    whole = mixed_attention(queries, kv, batch, rule, fixed_split=32)
    at = torch.tensor([0, 1], dtype=torch.int32, device=device)
    for token in (0, 7, 23):
        alone = MixedBatch(at, batch.context_lengths[:1] - (23 - token), batch.block_tables[:1], 1, 300)
        found = mixed_attention(queries[token : token + 1].clone(), kv, alone, rule, fixed_split=32)
        # The interpreter multiplies by BLAS, which rounds by a row's place in its matrix.
        exact = 0.0 if device.type == "cuda" else 1e-6
        torch.testing.assert_close(found[0], whole[token], rtol=0, atol=exact)
    # So many programs that each takes all splits.
    many = 5
    tables = batch.block_tables[1:].expand(many, -1).contiguous()
    starts = torch.arange(many + 1, dtype=torch.int32, device=device)
    crowd = MixedBatch(starts, batch.context_lengths[1:].expand(many).contiguous(), tables, 1, 80)
    found = mixed_attention(queries[-1:].expand(many, -1, -1).contiguous(), kv, crowd, rule, fixed_split=32)
    assert torch.equal(found, whole[-1:].expand(many, -1))


def test_rows_of_no_sequence_stay_and_empty_sequences_do_no_harm(device: torch.device) -> None:
    case = Case([(2, 40), (1, 20)])
    queries, kv, batch = case.build(device)
    padded = torch.cat((queries, torch.full_like(queries[:2], float("nan"))))
    wider = replace(
        batch,
        query_starts=torch.cat((batch.query_starts, batch.query_starts[-1:].expand(2))),
        context_lengths=torch.cat((batch.context_lengths, torch.zeros_like(batch.context_lengths))),
        block_tables=torch.cat((batch.block_tables, torch.zeros_like(batch.block_tables))),
    )
    for fixed_split in (None, 32):
        found = mixed_attention(padded, kv, wider, case.rule, fixed_split=fixed_split)
        assert torch.equal(found[:3], mixed_attention(queries, kv, batch, case.rule, fixed_split=fixed_split))
        assert torch.equal(found[3:], torch.zeros_like(found[3:]))


def test_nan_of_one_sequence_stays_with_it(device: torch.device) -> None:
    case = Case([(1, 70), (1, 70), (3, 30)])
    queries, kv, batch = case.build(device)
    clean = mixed_attention(queries, kv, batch, case.rule)
    kv.hot[:, int(batch.block_tables[1, 0])] = float("nan")
    found = mixed_attention(queries, kv, batch, case.rule)
    assert bool(found[1].isnan().all())
    assert torch.equal(found[[0, 2, 3, 4]], clean[[0, 2, 3, 4]])


def test_refuses_what_does_not_fit(device: torch.device) -> None:
    queries, kv, batch = Case([(1, 20)]).build(device)
    rule = AttentionRule(1.0)
    with pytest.raises(ValueError, match="query_starts, context_lengths"):
        mixed_attention(queries, kv, replace(batch, context_lengths=batch.context_lengths.repeat(2)), rule)
    with pytest.raises(ValueError, match="int32"):
        mixed_attention(queries, kv, replace(batch, block_tables=batch.block_tables.long()), rule)
    with pytest.raises(ValueError, match="sinks"):
        mixed_attention(queries, kv, batch, AttentionRule(1.0, sinks=torch.zeros(3, device=device)))
    with pytest.raises(ValueError, match="multiples of 32"):
        mixed_attention(queries, kv, batch, rule, fixed_split=40)
    with pytest.raises(ValueError, match="over blocks"):
        mixed_attention(queries[..., :10], kv, batch, rule)
