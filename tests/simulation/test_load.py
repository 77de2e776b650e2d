"""Loads: lengths, arrivals, tenants, and token ids that share what they should."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from quire.bench.workload import TraceScale
from quire.simulation.load import Asked, Lengths, Prompts, Tenant, arriving, closed, recorded

TENANTS = (Tenant("a", 3.0), Tenant("b", 1.0))


@pytest.fixture
def lengths(tmp_path: Path) -> Lengths:
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:00:00.0,80,8\n2023-11-16 18:00:01.0,160,16\n2023-11-16 18:00:04.0,800,80\n"
    )
    return Lengths.trace(path, TraceScale(lengths=1 / 8))


def test_a_trace_comes_as_it_was_and_then_again(lengths: Lengths) -> None:
    load = recorded(lengths, 7, TENANTS, 0)
    assert [asked.arrival for asked in load] == pytest.approx([0, 1, 4, 6, 7, 10, 12])
    assert [asked.prompt_tokens for asked in load][:3] == [10, 20, 100]
    assert [asked.output_tokens for asked in load][:3] == [1, 2, 10]
    assert len(recorded(lengths, None, TENANTS, 0)) == 3


@pytest.mark.parametrize("burstiness", [0.0, 1.0, 3.0])
def test_random_arrivals_have_the_rate_and_the_burstiness(lengths: Lengths, burstiness: float) -> None:
    load = arriving(lengths, 20_000, 50.0, burstiness, TENANTS, 1)
    gaps = np.diff(load.arrivals)
    assert gaps.mean() == pytest.approx(0.02, rel=0.1)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness, rel=0.1, abs=1e-6)
    assert np.bincount(load.rows).min() > 6000
    assert (load.tenants == 0).mean() == pytest.approx(0.75, abs=0.02)
    again = arriving(lengths, 20_000, 50.0, burstiness, TENANTS, 1)
    assert (again.arrivals == load.arrivals).all()
    assert (again.rows == load.rows).all()


def test_a_closed_loop_has_no_arrivals(lengths: Lengths) -> None:
    load = closed(lengths, 5, 2, TENANTS, 0)
    assert load.concurrency == 2
    assert not load.arrivals.any()


def test_prompts_differ_from_their_first_block_on() -> None:
    prompts = Prompts(vocab_size=50, block_tokens=16, longest=40)
    heads = {tuple(prompts.of(Asked(number, 0.0, 40, 1, 0, ()))[:8]) for number in range(3000)}
    assert len(heads) == 3000
    assert max(max(head) for head in heads) < 50


def test_prompts_share_the_blocks_that_are_equal() -> None:
    prompts = Prompts(vocab_size=50, block_tokens=16, longest=40)
    one, other = (prompts.of(Asked(n, 0.0, 40, 1, 0, (4, 5, 6 + n))) for n in (0, 1))
    assert len(one) == len(other) == 40
    assert one[:32] == other[:32]
    assert one[32:] != other[32:]
    plain = prompts.of(Asked(4, 0.0, 40, 1, 0, ()))
    assert plain[:16] != one[:16]


def test_a_trace_with_fewer_ids_than_its_lengths_is_filled_up() -> None:
    prompts = Prompts(vocab_size=50, block_tokens=16, longest=40)
    assert len(prompts.of(Asked(0, 0.0, 40, 1, 0, (4,)))) == 40
