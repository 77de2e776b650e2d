"""What the logits of models on the same text come to, and how sure one is better than another."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from services.executor.eval.bootstrap import Interval, Resamples
from services.executor.eval.compute import score_text
from services.executor.eval.measures import (
    Agreement,
    Distance,
    Fit,
    Float64,
    compare,
    summarize_agreement,
    summarize_fit,
)
from services.executor.eval.text import Int64, Passage
from services.executor.eval.windows import Frame
from services.executor.loader import LoadedModel


@dataclass(frozen=True, slots=True)
class Score:
    """Of one model."""

    fit: Fit
    agreement: Agreement | None  # with the first of the models; None of that itself
    sums: Float64  # [W] log likelihoods of windows
    token_counts: Int64  # [W] scored tokens of windows


@dataclass(frozen=True, slots=True)
class Difference:
    """How much likelier one model finds a text than another does, in nats per token."""

    better: str
    worse: str
    nats: float  # at least 0
    interval: Interval | None  # None where the text is a single window

    @property
    def is_certain(self) -> bool:
        """Whether it is more than chance: the interval does not reach 0."""
        return self.interval is not None and self.interval.low > 0


def score(
    models: Sequence[LoadedModel], passages: Sequence[Passage], frame: Frame, scored: Callable[[int], object]
) -> list[Score]:
    """Of each model, on the same tokens; `scored` hears of tokens as they are done. Raises NOT_FINITE."""
    numbers: list[Int64] = []
    found: list[list[Float64]] = [[] for _ in models]
    distances: list[list[Distance]] = [[] for _ in models]
    byte_count = 0
    for part in score_text(models, passages, frame):
        numbers.append(np.full(len(part.targets), part.window))
        byte_count += part.byte_count
        likelihoods, apart = compare(part.logits, part.targets)
        for own, more in zip(found, likelihoods, strict=True):
            own.append(more)
        for far, one in zip(distances[1:], apart, strict=True):
            far.append(one)
        scored(len(part.targets))
    windows = np.concatenate(numbers)
    token_counts = np.bincount(windows)

    def summarize(likelihoods: Float64, distances: Sequence[Distance]) -> Score:
        agreement = summarize_agreement(distances) if distances else None
        sums = np.bincount(windows, likelihoods).astype(np.float64)
        return Score(summarize_fit(likelihoods, byte_count), agreement, sums, token_counts)

    return [summarize(np.concatenate(parts), apart) for parts, apart in zip(found, distances, strict=True)]


def perplexity_interval(score: Score, resamples: Resamples) -> Interval | None:
    """None where the text is a single window."""
    found = resamples.interval(-score.sums)
    return None if found is None else Interval(math.exp(found.low), math.exp(found.high))


def differences(scores: Sequence[tuple[str, Score]], resamples: Resamples) -> list[Difference]:
    """Of all pairs of named models, the better one first; pairs of the best models come first."""
    ranked = sorted(scores, key=lambda named: named[1].fit.nll)
    found = []
    for (better, high), (worse, low) in combinations(ranked, 2):
        nats = low.fit.nll - high.fit.nll
        found.append(Difference(better, worse, nats, resamples.interval(high.sums - low.sums)))
    return found
