"""A service that handles its messages one after the other on one core, as an event loop does."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from quire.simulation.timeline import Timeline

Handler = Callable[[Any, float], None]
"""Takes a message in at a time."""


@dataclass(frozen=True, slots=True)
class Latencies:
    """What messages cost, in seconds."""

    link: float = 0.00015  # from one service to another: half of a measured round trip
    message: float = 0.0001  # a service's own time for one message


class Service:
    """Messages wait while the service is busy; all that wait are taken in together, then `act` follows once.

    That is what the real loops do: several kicks make one turn.
    """

    def __init__(self, timeline: Timeline, message_seconds: float, stolen: Callable[[float], None]) -> None:
        """`stolen` hears how long the service computed: executors on the same cores stand still meanwhile."""
        self.timeline = timeline
        self.busy_seconds = 0.0
        self._message_seconds = message_seconds
        self._stolen = stolen
        self._inbox: deque[tuple[Handler, Any]] = deque()
        self._free_at = 0.0
        self._is_woken = False

    def post(self, handler: Handler, message: Any) -> None:
        """Queues a message for the service."""
        self._inbox.append((handler, message))
        self.wake()

    def wake(self) -> None:
        """Lets the service act as soon as it can."""
        if not self._is_woken:
            self._is_woken = True
            self.timeline.at(self._free_at, self._work)

    def act(self, now: float, spent: float) -> None:
        """What follows from the messages taken in; what it sends leaves `spent` seconds from now."""

    def _work(self) -> None:
        self._is_woken = False
        now, inbox = self.timeline.now, self._inbox
        count = len(inbox)
        spent = count * self._message_seconds
        for _ in range(count):
            handler, message = inbox.popleft()
            handler(message, now)
        self._free_at = now + spent
        self.busy_seconds += spent
        if spent:
            self._stolen(spent)
        self.act(now, spent)
