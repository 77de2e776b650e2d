"""Virtual time: what happens when."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Any


class Timeline:
    """A queue of things to do, by time in seconds. Of equal times the one that was asked for first comes first."""

    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._queue)

    def at(self, when: float, action: Callable[..., None], *args: Any) -> None:
        """Calls `action(*args)` at that time, or now where it is over."""
        heapq.heappush(self._queue, (max(when, self.now), next(self._numbers), action, args))

    def advance(self) -> None:
        """Does what comes next. IndexError where nothing does."""
        self.now, _, action, args = heapq.heappop(self._queue)
        action(*args)
