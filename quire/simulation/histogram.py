"""Percentiles of a stream of values in constant memory."""

from __future__ import annotations

import math

LEAST, MOST = 1e-6, 1e7
"""Seconds; what lies beyond counts as these."""
STEPS = 200
"""Classes per factor of e: a value is known within a quarter of a percent."""
_SHIFT = math.log(LEAST)


class Histogram:
    """Counts of values in classes of equal ratio."""

    __slots__ = ("_counts", "count", "largest", "smallest", "total")

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        self.smallest, self.largest = math.inf, 0.0
        self._counts = [0] * (int((math.log(MOST) - _SHIFT) * STEPS) + 1)

    def add(self, value: float, count: int = 1) -> None:
        """Counts a value, which is not negative, so many times."""
        self.count += count
        self.total += value * count
        if value < self.smallest:
            self.smallest = value
        if value > self.largest:
            self.largest = value
        self._counts[int((math.log(min(max(value, LEAST), MOST)) - _SHIFT) * STEPS)] += count

    @property
    def mean(self) -> float | None:
        return self.total / self.count if self.count else None

    def percentile(self, rank: float) -> float | None:
        """The value below which `rank` percent lie; exact where all are equal. None of nothing."""
        if not self.count:
            return None
        wanted = max(1, math.ceil(self.count * rank / 100))
        below = 0
        for index, count in enumerate(self._counts):
            below += count
            if below >= wanted:
                middle = math.exp(_SHIFT + (index + 0.5) / STEPS)
                return min(max(middle, self.smallest), self.largest)
        return self.largest

    def curve(self) -> list[tuple[float, float]]:
        """(value, part of all that is at most it), ascending."""
        points, below = [], 0
        for index, count in enumerate(self._counts):
            if count:
                below += count
                points.append((math.exp(_SHIFT + (index + 1) / STEPS), below / self.count))
        return points
