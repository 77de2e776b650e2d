"""Orders and ratios of the comparison with peers."""

from __future__ import annotations

import pytest

from benchmarks.peers.samples import OURS, Sample, bracketed, hardest, ratios


def run(contestant: str, value: float, number: int = 0, figure: str = "decode 1") -> Sample:
    return Sample("engine", contestant, number, 1.0, {figure: value})


def test_each_peer_stands_between_two_runs_of_quire_and_rounds_begin_with_another() -> None:
    assert list(bracketed(["a", "b", "c"], 0)) == [OURS, "a", OURS, "b", OURS, "c", OURS]
    assert list(bracketed(["a", "b", "c"], 4)) == [OURS, "b", OURS, "c", OURS, "a", OURS]
    assert list(bracketed([], 1)) == [OURS]


def test_a_ratio_compares_with_the_mean_of_the_runs_around() -> None:
    drifting = [run(OURS, 100), run("a", 50), run(OURS, 300), run("b", 100), run(OURS, 500)]
    assert ratios(drifting, "decode 1", "a") == {0: 4.0}
    assert ratios(drifting, "decode 1", "b") == {0: 4.0}


def test_ratios_never_reach_across_rounds_or_over_missing_figures() -> None:
    samples = [run("a", 50), run(OURS, 100), run(OURS, 100, 1), run("a", 50, 1), run(OURS, 100, 2)]
    assert ratios(samples, "decode 1", "a") == {}
    odd = [run(OURS, 100, figure="decode 8"), run("a", 50), run(OURS, 100)]
    assert ratios(odd, "decode 1", "a") == {}


def test_the_hardest_peer_of_each_round_counts() -> None:
    samples = [
        *(run(OURS, 100), run("a", 50), run(OURS, 100), run("b", 25), run(OURS, 100)),
        *(run(OURS, 100, 1), run("b", 80, 1), run(OURS, 100, 1), run("a", 40, 1), run(OURS, 100, 1)),
        *(run(OURS, 100, 2), run("a", 10, 2), run(OURS, 100, 2)),
    ]
    assert hardest(samples, "decode 1", ["a", "b"], min) == pytest.approx([2.0, 1.25])
    assert hardest(samples, "decode 1", ["a", "b"], max) == pytest.approx([4.0, 2.5])
    assert hardest(samples, "decode 1", [], min) == []
