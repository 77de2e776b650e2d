"""A process of the simulated world: it dies and comes back as another one, stands still, and has a clock of its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from quire.simulation.timeline import Timeline

Action = Callable[..., None]

ROUNDING = 1e-9
"""Seconds: no timer rings before its time, whatever sums of clocks round to."""


class Party(ABC):
    """What runs on one event loop. Everything that happens to it passes through `run`."""

    def __init__(self, timeline: Timeline, name: str) -> None:
        self.timeline = timeline
        self.name = name
        self.life = 0  # counts its processes; 0 before the first
        self.alive = False
        self._ahead = 0.0  # seconds of its clock
        self._frozen = 0  # freezes that have not ended
        self._backlog: list[tuple[int, Action, tuple[Any, ...]]] = []
        self._timers: dict[int, tuple[float, Action, tuple[Any, ...]]] = {}  # due by its own clock
        self._timer_count = 0

    @property
    def now(self) -> float:
        """Seconds of its own monotonic clock."""
        return self.timeline.now + self._ahead

    def begin(self) -> None:
        """A new process, which knows nothing."""
        self.life += 1
        self.alive = True
        self.start()

    @abstractmethod
    def start(self) -> None:
        """What a new process does first."""

    def die(self) -> None:
        """Everything that it knew and was about to do is gone."""
        self.alive = False
        self._backlog.clear()
        self._timers.clear()

    def run(self, life: int, action: Action, *args: Any) -> None:
        """Does something that was meant for the process `life`; later where it stands still, never where it is gone."""
        if life != self.life or not self.alive:
            return
        if self._frozen:
            self._backlog.append((life, action, args))
            return
        action(*args)
        self.settled()

    def settled(self) -> None:  # noqa: B027 - most parties have nothing to do
        """Called after everything that happened to it."""

    def after(self, seconds: float, action: Action, *args: Any) -> None:
        """Does something later, by its own clock."""
        self._timer_count += 1
        number, due = self._timer_count, self.now + max(0.0, seconds) + ROUNDING
        self._timers[number] = (due, action, args)
        self.timeline.at(due - self._ahead, self._ring, self.life, number)

    def freeze(self, seconds: float) -> None:
        """Stands still: messages and timers wait."""
        self._frozen += 1
        self.timeline.at(self.timeline.now + seconds, self._thaw)

    def jump(self, seconds: float) -> None:
        """Its clock jumps forward, as after a suspended machine: timers that are due by then ring at once."""
        self._ahead += seconds
        for number, (due, _, _) in self._timers.items():
            self.timeline.at(due - self._ahead, self._ring, self.life, number)

    def _ring(self, life: int, number: int) -> None:
        if life == self.life and (timer := self._timers.pop(number, None)) is not None:
            _, action, args = timer
            self.run(life, action, *args)

    def _thaw(self) -> None:
        self._frozen -= 1
        if not self._frozen:
            backlog, self._backlog = self._backlog, []
            for life, action, args in backlog:
                self.run(life, action, *args)
