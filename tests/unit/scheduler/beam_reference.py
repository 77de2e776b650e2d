"""Beam search written apart: every step looks at the whole vocabulary behind every path, with nothing kept between."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


class Answer(NamedTuple):
    tokens: list[int]
    total: float  # log probability
    score: float
    ends: bool  # with an end token


def beam_search(
    log_probabilities: Callable[[list[int]], Array],
    prompt: Sequence[int],
    width: int,
    *,
    max_tokens: int,
    min_tokens: int = 0,
    ends: Collection[int] = (),
    length_penalty: float = 1.0,
) -> list[Answer]:
    """The best `width` answers. `log_probabilities` gives those of all tokens behind a text [vocabulary]."""
    running = [Answer([], 0.0, 0.0, False)]
    finished: list[Answer] = []
    for length in range(1, max_tokens + 1):
        following = []
        for path in running:
            values = np.asarray(log_probabilities([*prompt, *path.tokens]), np.float64).copy()
            if length <= min_tokens:
                values[list(ends)] = -np.inf
            for token in np.argsort(-values, kind="stable")[: width + len(ends)].tolist():
                if values[token] > -np.inf:
                    total = path.total + float(values[token])
                    following.append(
                        Answer([*path.tokens, token], total, total / length**length_penalty, token in ends)
                    )
        following.sort(key=lambda answer: -answer.total)
        over = [answer for answer in following[:width] if answer.ends or length == max_tokens]
        finished = sorted([*finished, *over], key=lambda answer: -answer.score)[:width]
        running = [answer for answer in following if not answer.ends][:width]
        if len(finished) == width and running[0].score <= finished[-1].score:
            break
    return finished
