"""Moves of blocks beside the steps: one at a time, on a thread of its own, loads before anything else."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from services.executor.operations import Move
from services.executor.tiers.store import Outcome

log = logging.getLogger("quire.executor")


class Mover:
    """A queue of moves and the thread that makes them. What waits takes no memory but its description.

    The order among moves is free: whoever asks for one holds source and destination until it is reported.
    """

    def __init__(
        self, name: str, perform: Callable[[Move], Outcome], on_ended: Callable[[Move, Outcome], None], rest: float = 0
    ) -> None:
        """`perform` makes a move; `on_ended` hears of each once, on either thread.

        `rest`: pause after a move that nobody waits for, in multiples of the CPU time that it took.
        """
        self._perform, self._on_ended, self._rest = perform, on_ended, rest
        self._rested_at = 0.0  # monotonic
        self._urgent: deque[Move] = deque()  # a sequence waits for them
        self._others: deque[Move] = deque()
        self._changed = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, move: Move) -> None:
        with self._changed:
            if not self._stopping:
                (self._urgent if move.fills_device else self._others).append(move)
                self._changed.notify()
                return
        self._on_ended(move, Outcome.DROPPED)

    def drop(self) -> None:
        """Ends all moves that have not begun."""
        with self._changed:
            dropped = [*self._urgent, *self._others]
            self._urgent.clear()
            self._others.clear()
        for move in dropped:
            self._on_ended(move, Outcome.DROPPED)

    def stop(self) -> None:
        """As drop, then waits for the move in hand: afterwards nothing is written any more."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self.drop()
        self._thread.join()

    def _run(self) -> None:
        while (move := self._next()) is not None:
            started = time.thread_time()
            try:
                outcome = self._perform(move)
            except Exception:
                log.exception("a KV block could not be moved", extra={"operation": move.operation_id})
                outcome = Outcome.ERROR
            if not move.fills_device:
                self._rested_at = time.monotonic() + self._rest * (time.thread_time() - started)
            self._on_ended(move, outcome)

    def _next(self) -> Move | None:
        with self._changed:
            while not self._stopping:
                if self._urgent:
                    return self._urgent.popleft()
                left = self._rested_at - time.monotonic()
                if self._others and left <= 0:
                    return self._others.popleft()
                self._changed.wait(left if self._others else None)
        return None
