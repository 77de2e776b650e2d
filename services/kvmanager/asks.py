"""When executors are asked for their inventories."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from services.kvmanager.executors import Executor


class Asks:
    """An inventory counts only where it is of a moment after everybody who may write there was known."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._schedulers: set[str] = set()  # that were ever seen

    def executor_came(self, executor: Executor) -> None:
        executor.ask(next(self._numbers))

    def scheduler_came(self, scheduler_id: str, executors: Iterable[Executor]) -> None:
        """One that is seen for the first time may have written to blocks that an earlier process granted, and hold them
        no longer: executors with content from before are asked for it anew.
        """
        if scheduler_id in self._schedulers:
            return
        self._schedulers.add(scheduler_id)
        for executor in executors:
            if executor.inherits or executor.asked:
                executor.ask(next(self._numbers))
