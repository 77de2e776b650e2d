"""How sure the mean over a text is: the bootstrap (Efron 1979) over its windows.

Tokens of a window depend on each other, windows hardly, so whole windows are drawn. Draws are the same each time, and
the same for all models of a text: differences between two models are paired.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]

RESAMPLES = 2000
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Interval:
    """Where the mean lies with CONFIDENCE."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Resamples:
    """How often each resample holds each window, and how many tokens it has."""

    draws: Float64  # [RESAMPLES, W]
    token_counts: Float64  # [RESAMPLES]

    @classmethod
    def of(cls, token_counts: NDArray[np.int64]) -> Self:
        """Resamples of windows [W] with so many tokens each, at least one."""
        count = len(token_counts)
        draws = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), RESAMPLES).astype(np.float64)
        return cls(draws, draws @ token_counts)

    def interval(self, sums: Float64) -> Interval | None:
        """Of the mean per token of something that sums up to `sums` [W] in each window. None for a single window."""
        if len(sums) < 2:
            return None
        tail = (1 - CONFIDENCE) / 2
        low, high = np.quantile(self.draws @ sums / self.token_counts, (tail, 1 - tail))
        return Interval(float(low), float(high))
