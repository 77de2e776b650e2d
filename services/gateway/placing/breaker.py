"""Whether a scheduler is asked for a model: not while most of what it was asked lately failed, or was slow. Pure.

Closed, a breaker lets everything through and counts what became of it. Open, it lets nothing through for a while. Then,
half open, it lets a few requests through to see: all of them well close it, one that is not opens it for twice as long.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass


class Outcome(enum.Enum):
    """What became of a request that was let through."""

    GOOD = enum.auto()
    SLOW = enum.auto()
    FAILED = enum.auto()
    UNKNOWN = enum.auto()  # its client went first


class Phase(enum.IntEnum):
    """As the metric shows it."""

    CLOSED = 0
    HALF_OPEN = 1
    OPEN = 2


@dataclass(frozen=True, slots=True)
class Rules:
    """When to open and for how long, in seconds."""

    window: float = 30.0
    least: int = 20  # outcomes in the window below which nothing is concluded
    failure_rate: float = 0.5
    slow_rate: float = 0.8
    first_pause: float = 2.0
    longest_pause: float = 60.0
    probes: int = 3


class Breaker:
    """One scheduler's and model's. Times are seconds of one monotonic clock and never go back."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._outcomes: deque[tuple[float, Outcome]] = deque()
        self._counts = dict.fromkeys(Outcome, 0)
        self._pause = 0.0  # 0 while closed
        self._opened_at = 0.0
        self._probing = self._passed = 0

    def phase(self, now: float) -> Phase:
        if not self._pause:
            return Phase.CLOSED
        return Phase.HALF_OPEN if now >= self._opened_at + self._pause else Phase.OPEN

    def admits(self, now: float) -> bool:
        """Whether one more request may go through now. Changes nothing."""
        phase = self.phase(now)
        return phase is Phase.CLOSED or (phase is Phase.HALF_OPEN and self._probing + self._passed < self._rules.probes)

    def retry_after(self, now: float) -> float:
        """Seconds until it may let something through again; 0 where it may now."""
        if self.admits(now):
            return 0.0
        return max(self._opened_at + self._pause - now, self._rules.first_pause / 2)

    def begin(self, now: float) -> None:
        """A request goes through."""
        if self.phase(now) is Phase.HALF_OPEN:
            self._probing += 1

    def end(self, outcome: Outcome, now: float) -> None:
        """What became of a request that went through."""
        phase = self.phase(now)
        if phase is Phase.CLOSED:
            self._count(outcome, now)
            if self._is_bad():
                self._open(self._rules.first_pause, now)
        elif phase is Phase.HALF_OPEN and self._probing:  # what went through before it opened says nothing new
            self._probing -= 1
            if outcome in (Outcome.FAILED, Outcome.SLOW):
                self._open(min(2 * self._pause, self._rules.longest_pause), now)
            elif outcome is Outcome.GOOD:
                self._passed += 1
                if self._passed >= self._rules.probes:
                    self._close()

    def _count(self, outcome: Outcome, now: float) -> None:
        if outcome is Outcome.UNKNOWN:
            return
        self._outcomes.append((now, outcome))
        self._counts[outcome] += 1
        while now - self._outcomes[0][0] > self._rules.window:
            self._counts[self._outcomes.popleft()[1]] -= 1

    def _is_bad(self) -> bool:
        total, counts, rules = len(self._outcomes), self._counts, self._rules
        if total < rules.least:
            return False
        failed, slow = counts[Outcome.FAILED], counts[Outcome.SLOW]
        return failed >= rules.failure_rate * total or slow + failed >= rules.slow_rate * total

    def _open(self, pause: float, now: float) -> None:
        self._pause, self._opened_at = pause, now
        self._probing = self._passed = 0

    def _close(self) -> None:
        self._pause = 0.0
        self._probing = self._passed = 0
        self._outcomes.clear()
        self._counts = dict.fromkeys(Outcome, 0)
