"""When executors are asked for their inventories."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from services.kvmanager.executors import Executor


class Asks:
    """An inventory counts only where it is of a moment after everybody who may write there was known."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._schedulers: set[str] = set()  # that ever restated what they hold

    def executor_came(self, executor: Executor) -> None:
        executor.ask(next(self._numbers))

    def scheduler_restated(self, scheduler_id: str, executors: Iterable[Executor]) -> None:
        """All that it holds is known by now, the first time.

        What it wrote to blocks that an earlier process granted, and holds no longer, executors must tell: those with
        content from before are asked anew.
        """
        if scheduler_id in self._schedulers:
            return
        self._schedulers.add(scheduler_id)
        for executor in executors:
            self._ask_again(executor)

    def epoch_opened(self, executor: Executor) -> None:
        """Until then sequences of the epoch before were computed, as far as they had credit."""
        self._ask_again(executor)

    def _ask_again(self, executor: Executor) -> None:
        if executor.inherits or executor.asked:
            executor.ask(next(self._numbers))
