"""What has to be reached, from samples to verdicts."""

from __future__ import annotations

import pytest

from benchmarks.peers.bars import Row, rows
from benchmarks.peers.samples import BOUND, OURS, Sample


def alternating(suite: str, figures: dict[str, dict[str, float]]) -> list[Sample]:
    """One round in which Quire is measured around each peer."""
    samples = [Sample(suite, OURS, 0, 1.0, figures[OURS])]
    for peer in figures.keys() - {OURS}:
        samples += [Sample(suite, peer, 0, 1.0, figures[peer]), Sample(suite, OURS, 0, 1.0, figures[OURS])]
    return samples


def by_title(samples: list[Sample]) -> dict[str, Row]:
    return {row.title: row for row in rows(samples)}


@pytest.mark.parametrize(
    ("row", "verdict"),
    [
        (Row("", 2.0, 3.0, (1.0, 1.9, 5.0)), "missed"),
        (Row("", 2.0, 3.0, (1.0, 2.0, 5.0)), "met"),
        (Row("", 2.0, 3.0, (3.0,)), "aim met"),
        (Row("", 0.8, 0.5, (0.9,), less_is_better=True), "missed"),
        (Row("", 0.8, 0.5, (0.8,), less_is_better=True), "met"),
        (Row("", 0.8, 0.5, (0.4,), less_is_better=True), "aim met"),
    ],
)
def test_the_median_decides(row: Row, verdict: str) -> None:
    assert row.verdict == verdict


def test_engines_are_compared_with_the_named_or_the_best_one() -> None:
    figures = {
        OURS: {"decode 1": 400.0, "decode 32": 1500.0, "prefill 512": 2000.0},
        "llama.cpp Q4_0": {"decode 1": 200.0, "decode 32": 500.0, "prefill 512": 1000.0},
        "llama.cpp Q4_1": {"decode 1": 160.0, "decode 32": 300.0, "prefill 512": 300.0},
        "openvino Q4_0": {"decode 1": 100.0, "decode 32": 600.0, "prefill 512": 1600.0},
    }
    found = by_title(alternating("engine", figures))
    assert found["decode, batch 1, against llama.cpp Q4_0"].values == (2.0,)
    assert found["decode, batch 1, against llama.cpp, same file"].values == (2.5,)
    assert found["decode, batch 32, against the best engine"].values == (2.5,)
    assert found["prefill of 512 tokens, against the best engine"].values == (1.25,)


def test_servers_and_the_engine_bound_are_kept_apart() -> None:
    figures = {
        OURS: {"http output tok/s @32": 500.0, "http gap p99 @32": 60.0, "grpc output tok/s @32": 540.0},
        "llama.cpp Q4_0": {"http output tok/s @32": 250.0, "http gap p99 @32": 120.0},
        "vllm bf16": {"http output tok/s @32": 320.0, "http gap p99 @32": 150.0},
        BOUND: {"grpc output tok/s @32": 600.0},
    }
    found = by_title(alternating("serve", figures))
    assert found["served over http, 32 at once, against the best server"].values == (500 / 320,)
    assert found["p99 gap between messages, http, 32 at once"].values == (0.5,)
    assert found["served over grpc, 32 at once, against the engine bound"].values == (0.9,)


def test_memory_bars_depend_on_how_fast_the_read_is() -> None:
    samples = [Sample("memory", OURS, 0, 1.0, {"read GB/s": 30.0, "share below 40 GB/s": 0.8})]
    (row,) = rows(samples)
    assert (row.bar, row.values, row.verdict) == (0.75, (0.8,), "met")


def test_a_newcomer_may_wait_two_steps_and_five_milliseconds() -> None:
    figures = {"first token ms": 60.0, "engine's own ms": 40.0, "step ms": 10.0}
    (row,) = rows([Sample("newcomer", OURS, 0, 1.0, figures)])
    assert (row.bar, row.aim, row.values, row.verdict) == (25.0, 13.0, (20.0,), "met")


def test_nothing_measured_gives_no_lines() -> None:
    assert rows([]) == []
