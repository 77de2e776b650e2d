"""How evenly tenants were served while they waited side by side."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

BINS = 10
"""A window slides by one part in so many of its length."""


def jain(shares: Sequence[float]) -> float:
    """Jain, Chiu and Hawe (1984): 1 where all are equal, 1/n where one of n has everything."""
    squares = sum(share * share for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else 1.0


class Bin(NamedTuple):
    """A stretch of time."""

    served: list[float]  # by tenant
    waited: list[bool]  # whether the tenant had something waiting all along


class Fairness:
    """Jain's index of what tenants were served for their weight, over every window in which several waited throughout.

    Only tenants that waited throughout count: the others had all that they asked for.
    """

    def __init__(self, weights: Sequence[float], window_seconds: float) -> None:
        self.window_count = 0
        self.worst: float | None = None
        self._total = 0.0
        self._weights = weights
        self._seconds = window_seconds / BINS
        self._recent: deque[Bin] = deque(maxlen=BINS)
        self._waiting = [0] * len(weights)
        self._bin = self._open()
        self._end = self._seconds

    @property
    def mean(self) -> float | None:
        return self._total / self.window_count if self.window_count else None

    def arrived(self, tenant: int, now: float) -> None:
        """A request of a tenant waits."""
        self._pass_time(now)
        self._waiting[tenant] += 1

    def left(self, tenant: int, now: float) -> None:
        """One of its requests waits no more."""
        self._pass_time(now)
        self._waiting[tenant] -= 1
        if not self._waiting[tenant]:
            self._bin.waited[tenant] = False

    def served(self, tenant: int, tokens: float, now: float) -> None:
        if now >= self._end:
            self._pass_time(now)
        self._bin.served[tenant] += tokens

    def _pass_time(self, now: float) -> None:
        while now >= self._end:
            self._close()
            self._bin = self._open()
            self._end += self._seconds

    def _open(self) -> Bin:
        return Bin([0.0] * len(self._weights), [waiting > 0 for waiting in self._waiting])

    def _close(self) -> None:
        recent = self._recent
        recent.append(self._bin)
        if len(recent) < BINS:
            return
        shares = [
            sum(one.served[tenant] for one in recent) / weight
            for tenant, weight in enumerate(self._weights)
            if all(one.waited[tenant] for one in recent)
        ]
        if len(shares) > 1:
            index = jain(shares)
            self.window_count += 1
            self._total += index
            self.worst = index if self.worst is None else min(self.worst, index)
