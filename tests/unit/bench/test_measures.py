"""Statistics of the load generator."""

from __future__ import annotations

import math

import pytest

from quire.bench.measures import Sample, engine_bound, message_gaps, percentile, summarize, token_gaps


def test_percentiles_lie_between_neighbours() -> None:
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert percentile([1.0, 2.0], 50) == 1.5
    assert percentile([0.0, 10.0], 95) == pytest.approx(9.5)
    assert percentile([4.0], 99) == 4.0
    assert math.isnan(percentile([], 50))


def test_tokens_of_one_message_share_its_gap() -> None:
    sample = Sample(0.0, arrivals=[1.0, 1.2, 1.6], token_counts=[1, 2, 4], output_tokens=7)
    assert token_gaps(sample) == pytest.approx([0.1, 0.1, 0.1, 0.1, 0.1, 0.1])


def test_gaps_between_messages_whatever_they_bring() -> None:
    sample = Sample(0.0, arrivals=[1.0, 1.2, 1.6], token_counts=[1, 2, 4], output_tokens=7)
    assert message_gaps(sample) == pytest.approx([0.2, 0.4])
    assert summarize([sample])["gap_ms"] == {"p50": 300.0, "p95": 390.0, "p99": 398.0}


def test_without_counts_tokens_are_spread_evenly() -> None:
    sample = Sample(0.0, arrivals=[1.0, 1.2, 1.6], output_tokens=6)
    assert token_gaps(sample) == pytest.approx([0.1, 0.1, 0.2, 0.2])


def test_a_report_counts_good_requests_and_names_failures() -> None:
    samples = [
        Sample(0.0, [0.5, 1.0], [1, 1], end=1.0, output_tokens=2, prompt_tokens=5),
        Sample(1.0, [2.0], [1], end=2.0, output_tokens=1, prompt_tokens=5),
        Sample(0.0, error="UNAVAILABLE", end=9.0),
    ]
    report = summarize(samples)
    assert (report["requests"], report["errors"], report["error_kinds"]) == (3, 1, {"UNAVAILABLE": 1})
    assert (report["output_tok_s"], report["duration_s"], report["prompt_tokens"]) == (1.5, 2.0, 10)
    assert report["ttft_ms"]["p50"] == 750.0
    assert report["itl_ms"] == {"p50": 500.0, "p95": 500.0, "p99": 500.0}
    assert report["e2e_ms"]["p50"] == 1000.0


def test_a_report_of_failures_only_has_no_latencies() -> None:
    report = summarize([Sample(0.0, error="X", end=1.0)])
    assert report["output_tok_s"] == 0.0
    assert report["ttft_ms"] == {"p50": None, "p95": None, "p99": None}


def test_the_engine_bound() -> None:
    # 100 prompt tokens at 1000/s take 0.1 s, 50 output tokens at 100/s take 0.5 s.
    assert engine_bound(100, 50, 1000.0, 100.0) == pytest.approx(50 / 0.6)
