"""Pairs of models: which is better, and whether that is more than chance."""

import math

import numpy as np
import pytest

from services.executor.eval.bootstrap import Resamples
from services.executor.eval.measures import summarize_fit
from services.executor.eval.scores import Score, differences, perplexity_interval


def windows_of(values: np.ndarray) -> Score:
    """The score of log likelihoods [windows, tokens]."""
    counts = np.full(len(values), values.shape[1])
    return Score(summarize_fit(values.reshape(-1), 0), None, values.sum(1), counts)


@pytest.fixture
def text() -> np.ndarray:
    """Log likelihoods of 30 windows, some far easier than others."""
    draw = np.random.default_rng(2)
    return -np.abs(draw.normal(3, 1, (30, 50))) - draw.uniform(0, 3, (30, 1))


def test_pairs_are_surer_than_models_alone(text: np.ndarray) -> None:
    """A small loss on every token is certain although it drowns in what windows differ by."""
    noise = np.random.default_rng(3).normal(0.02, 0.05, text.shape)
    good, bad = windows_of(text), windows_of(text - noise)
    resamples = Resamples.of(good.token_counts)
    (pair,) = differences([("bad", bad), ("good", good)], resamples)
    assert (pair.better, pair.worse) == ("good", "bad")
    assert pair.nats == pytest.approx(noise.mean())
    assert pair.interval is not None
    assert 0 < pair.interval.low < pair.nats < pair.interval.high < 0.03
    assert pair.is_certain
    alone, other = perplexity_interval(good, resamples), perplexity_interval(bad, resamples)
    assert alone is not None
    assert other is not None
    assert alone.low < bad.fit.perplexity < alone.high
    assert other.low < good.fit.perplexity < other.high


def test_chance_is_not_certain(text: np.ndarray) -> None:
    noise = np.random.default_rng(4).normal(0, 1, text.shape)
    scores = [("a", windows_of(text)), ("b", windows_of(text + noise - noise.mean()))]
    (pair,) = differences(scores, Resamples.of(scores[0][1].token_counts))
    assert pair.interval is not None
    assert pair.interval.low < 0 < pair.interval.high
    assert not pair.is_certain


def test_equal_models_are_level(text: np.ndarray) -> None:
    (pair,) = differences([("a", windows_of(text)), ("b", windows_of(text))], Resamples.of(np.full(30, 50)))
    assert pair.nats == 0
    assert not pair.is_certain


def test_a_single_window_is_never_certain() -> None:
    values = np.full((1, 5), -2.0)
    (pair,) = differences([("a", windows_of(values)), ("b", windows_of(values - 1))], Resamples.of(np.array([5])))
    assert (pair.nats, pair.interval, pair.is_certain) == (1, None, False)
    assert perplexity_interval(windows_of(values), Resamples.of(np.array([5]))) is None


def test_pairs_come_in_order_of_quality(text: np.ndarray) -> None:
    scores = [(str(loss), windows_of(text - loss)) for loss in (2, 0, 3, 1)]
    found = differences(scores, Resamples.of(np.full(30, 50)))
    assert [(pair.better, pair.worse) for pair in found] == [
        ("0", "1"), ("0", "2"), ("0", "3"), ("1", "2"), ("1", "3"), ("2", "3"),
    ]  # fmt: skip
    assert [pair.nats for pair in found] == pytest.approx([1, 2, 3, 1, 2, 1])


def test_the_interval_of_perplexity_is_around_it(text: np.ndarray) -> None:
    one = windows_of(text)
    found = perplexity_interval(one, Resamples.of(one.token_counts))
    assert found is not None
    assert found.low < one.fit.perplexity < found.high
    error = text.mean(1).std() / math.sqrt(30)  # of the mean over windows
    assert math.log(found.high / found.low) == pytest.approx(2 * 1.96 * error, rel=0.2)
