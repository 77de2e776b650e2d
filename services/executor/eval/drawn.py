"""Text that a model writes itself, where there is no other."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from services.executor.backends.base import SampleRow, SamplingRule
from services.executor.eval.compute import inputs_for, not_finite
from services.executor.eval.text import Passage
from services.executor.loader import LoadedModel

DRAWN_TOKENS = 4000
"""How many are drawn where nobody says it."""

MOST_SEQUENCES = 8
"""Passages that are drawn at a time."""


def draw_passages(model: LoadedModel, count: int, length: int, drawn: Callable[[int], object]) -> list[Passage]:
    """At least `count` tokens in equal passages of at most `length`, drawn at temperature 1, the same each time.

    Each passage begins after the model's beginning-of-text token (token 0 where it has none), and goes on after an end
    of text. The pool must have room for MOST_SEQUENCES. `drawn` hears of tokens as they come. Raises NOT_FINITE.
    """
    passages = -(-count // length)
    length = -(-count // passages)
    written: list[Passage] = []
    while len(written) < passages:
        seeds = range(len(written), min(len(written) + MOST_SEQUENCES, passages))
        written += _draw(model, seeds, length, drawn)
    return written


def _draw(model: LoadedModel, seeds: range, length: int, drawn: Callable[[int], object]) -> list[Passage]:
    """One passage per seed, all at a time."""
    start = model.backend.spec.bos_token_id or 0
    outputs: list[list[int]] = [[] for _ in seeds]
    rows = [
        SampleRow(i, SamplingRule(seed=seed), [start], output)
        for i, (seed, output) in enumerate(zip(seeds, outputs, strict=True))
    ]
    for position in range(length):
        inputs = inputs_for(model, [(output or [start])[-1:] for output in outputs], position, rows)
        for output, sampled in zip(outputs, model.backend.step(inputs).sampled, strict=True):
            if sampled is None:
                raise not_finite(model)
            output.append(sampled.token_id)
        drawn(len(outputs))
    return [Passage((start,), np.array(output, np.int32), np.zeros(length, np.int64)) for output in outputs]
