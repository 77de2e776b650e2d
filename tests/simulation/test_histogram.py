"""Percentiles of a stream."""

from __future__ import annotations

import random

import pytest

from quire.simulation.histogram import Histogram


def test_nothing_has_no_percentiles() -> None:
    assert Histogram().percentile(50) is None
    assert Histogram().mean is None


def test_equal_values_are_exact() -> None:
    histogram = Histogram()
    histogram.add(0.123, 5)
    assert [histogram.percentile(rank) for rank in (0, 50, 100)] == [0.123] * 3
    assert histogram.mean == pytest.approx(0.123)


def test_percentiles_are_close_to_those_of_all_values() -> None:
    draw = random.Random(0)
    values = sorted(draw.lognormvariate(0, 2) for _ in range(5000))
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    for rank in (1, 50, 90, 99, 100):
        exact = values[max(0, round(len(values) * rank / 100) - 1)]
        assert histogram.percentile(rank) == pytest.approx(exact, rel=0.005)
    assert histogram.curve()[-1][1] == pytest.approx(1.0)


def test_values_beyond_the_classes_count() -> None:
    histogram = Histogram()
    for value in (0.0, 1e-9, 1e9):
        histogram.add(value)
    assert (histogram.count, histogram.smallest, histogram.largest) == (3, 0.0, 1e9)
    assert histogram.percentile(100) == pytest.approx(1e7, rel=0.005)
