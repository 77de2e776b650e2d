"""How long a new request would wait before it begins, from those that wait and those that began lately. Pure."""

from __future__ import annotations

from collections import deque

WINDOW_SECONDS = 10.0
"""Over which beginnings are counted; a queue younger than that is a burst."""


class Waits:
    """The queue of one model as this gateway sees it. Times are seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._waiting: dict[int, dict[int, float]] = {}  # priority -> handle -> since when
        self._priorities: dict[int, int] = {}  # by handle
        self._begun: deque[float] = deque()

    def __len__(self) -> int:
        return len(self._priorities)

    def enter(self, handle: int, priority: int, now: float) -> None:
        """A request begins to wait. Idempotent."""
        if handle not in self._priorities:
            self._priorities[handle] = priority
            self._waiting.setdefault(priority, {})[handle] = now

    def begin(self, handle: int, now: float) -> None:
        """A request waits no more, for it began."""
        if self.leave(handle):
            self._begun.append(now)

    def leave(self, handle: int) -> bool:
        """A request waits no more. Whether it did."""
        priority = self._priorities.pop(handle, None)
        if priority is None:
            return False
        del self._waiting[priority][handle]
        if not self._waiting[priority]:
            del self._waiting[priority]
        return True

    def expected(self, priority: int, now: float) -> float:
        """Seconds that a request of that priority would wait.

        As long as the oldest of those before it has waited, and, once that is long, as long as those before it take at
        the pace of the last seconds.
        """
        while self._begun and now - self._begun[0] > WINDOW_SECONDS:
            self._begun.popleft()
        ahead = [waiting for other, waiting in self._waiting.items() if other >= priority]
        if not ahead:
            return 0.0
        oldest = now - min(next(iter(waiting.values())) for waiting in ahead)
        if not self._begun or oldest < WINDOW_SECONDS:
            return oldest
        return max(oldest, sum(map(len, ahead)) * WINDOW_SECONDS / len(self._begun))
