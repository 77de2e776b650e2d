"""Intervals against what theory says of means."""

import math

import numpy as np
import pytest

from services.executor.eval.bootstrap import RESAMPLES, Interval, Resamples


def test_the_interval_is_that_of_a_normal_mean() -> None:
    """Of many windows of equal size the mean is normal: 1.96 standard errors to each side."""
    sums = np.random.default_rng(1).normal(500, 40, 400)
    found = Resamples.of(np.full(400, 100)).interval(sums)
    assert found is not None
    mean, error = sums.mean() / 100, sums.std() / math.sqrt(400) / 100
    assert found.low == pytest.approx(mean - 1.96 * error, abs=0.2 * error)
    assert found.high == pytest.approx(mean + 1.96 * error, abs=0.2 * error)


def test_windows_count_by_their_tokens() -> None:
    """A resample's mean is over its tokens: 3 of 10 tokens each time, whichever windows it holds."""
    token_counts = np.array([10, 200, 30, 1])
    found = Resamples.of(token_counts).interval(0.3 * token_counts)
    assert found is not None
    assert (found.low, found.high) == pytest.approx((0.3, 0.3))


def test_every_resample_draws_as_many_windows_as_there_are() -> None:
    found = Resamples.of(np.array([5, 7, 11]))
    assert found.draws.shape == (RESAMPLES, 3)
    assert (found.draws.sum(1) == 3).all()
    assert (found.draws.std(0) > 0).all()
    np.testing.assert_array_equal(found.token_counts, found.draws @ [5, 7, 11])


def test_draws_are_the_same_each_time() -> None:
    np.testing.assert_array_equal(Resamples.of(np.ones(9, int)).draws, Resamples.of(np.full(9, 4)).draws)


def test_a_single_window_says_nothing_of_chance() -> None:
    assert Resamples.of(np.array([100])).interval(np.array([7.0])) is None


def test_two_windows_bound_each_other() -> None:
    assert Resamples.of(np.array([10, 10])).interval(np.array([10.0, 30.0])) == Interval(1.0, 3.0)
