"""Log probabilities of tokens: of the model's raw logits, before any rule of the request.

Natural logs, never below -9999.0 (JSON has no infinity). A rank is one more than the number of likelier tokens;
equally likely alternatives are ordered by ascending id.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from services.executor.backends.base import TokenScores

Float32 = NDArray[np.float32]

LEAST_LOGPROB = np.float32(-9999.0)


def score(logits: Sequence[Float32], targets: Sequence[int], count: int) -> TokenScores:
    """Scores targets[i] under logits[i] [V] with min(count, V) alternatives. NaN where a row is not finite."""
    found = TokenScores([], [], [], [])
    for row, target in zip(logits, targets, strict=True):
        with np.errstate(invalid="ignore"):
            logprobs = log_softmax(row)
            ids = _most_likely(logprobs, min(count, len(logprobs)))
        found.chosen.append(float(np.maximum(logprobs[target], LEAST_LOGPROB)))
        found.ranks.append(int(np.count_nonzero(logprobs > logprobs[target])) + 1)
        found.top_ids.append(ids.tolist())
        found.top_logprobs.append(np.maximum(logprobs[ids], LEAST_LOGPROB).tolist())
    return found


def log_softmax(logits: Float32) -> Float32:
    """Of one row [V]."""
    shifted = logits - logits.max()
    result: Float32 = shifted - np.float32(np.log(np.exp(shifted).sum(dtype=np.float64)))
    return result


def _most_likely(logprobs: Float32, count: int) -> NDArray[np.int64]:
    if count == 0:
        return np.empty(0, np.int64)
    at = len(logprobs) - count
    least = np.partition(logprobs, at)[at]
    ids = np.flatnonzero(logprobs >= least) if least == least else np.arange(count)
    return ids[np.argsort(-logprobs[ids], kind="stable")[:count]]
