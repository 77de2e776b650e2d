"""A numbered log of blocks whose content became known or was dropped, for routers that follow it. No I/O."""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from services.kvmanager.pools import PoolSpec

BATCH_LIMIT = 1024
"""Events in one batch at most, so that its message stays small."""


class Stored(NamedTuple):
    """Content became known. Parent and tokens are empty for copies, and where an executor brought the block along."""

    key: bytes
    parent: bytes  # key of the block before it
    tokens: bytes  # 32-bit little-endian ids
    adapter: str
    pool: PoolSpec


class Removed(NamedTuple):
    """Content was dropped."""

    key: bytes
    pool: PoolSpec


class EventBatch(NamedTuple):
    """Events of one executor, in this order: all content dropped (where `cleared`), then `removed`, then `stored`."""

    number: int  # from 1, without gaps
    timestamp_ms: int
    executor_id: str
    cleared: bool
    removed: list[Removed]
    stored: list[Stored]

    @property
    def size(self) -> int:
        return 1 + len(self.removed) + len(self.stored)


class Lost(LookupError):
    """The batch asked for is not kept any more, or was never written."""


@dataclass(slots=True)
class _Open:
    """A batch that is being filled."""

    executor_id: str
    cleared: bool = False
    removed: list[Removed] = field(default_factory=list)
    stored: list[Stored] = field(default_factory=list)


class EventLog:
    """Keeps the newest batches, as long as they have no more than `capacity` events together.

    Every pool of an executor writes through `ExecutorEvents`; `commit` closes what was written since the last time.
    """

    def __init__(self, capacity: int) -> None:
        if capacity <= 0:
            raise ValueError("a log of events keeps at least one")
        self._capacity = capacity
        self._batches: deque[EventBatch] = deque()
        self._kept = 0  # events in them
        self._next = 1
        self._written: list[_Open] = []

    @property
    def next_number(self) -> int:
        """The number of the next batch."""
        return self._next

    @property
    def oldest_number(self) -> int:
        """The oldest batch that is kept; the next one where none is."""
        return self._next - len(self._batches)

    def commit(self, timestamp_ms: int) -> bool:
        """Numbers what was written since the last time. False where there was nothing."""
        if not self._written:
            return False
        for written in self._written:
            batch = EventBatch(
                self._next, timestamp_ms, written.executor_id, written.cleared, written.removed, written.stored
            )
            self._next += 1
            self._batches.append(batch)
            self._kept += batch.size
        self._written.clear()
        while self._kept > self._capacity and len(self._batches) > 1:
            self._kept -= self._batches.popleft().size
        return True

    def read(self, number: int, limit: int) -> list[EventBatch]:
        """Up to `limit` batches from this number on; none where it is the next one. Raises Lost."""
        if not self.oldest_number <= number <= self._next:
            raise Lost(f"batch {number} is not kept; the oldest is {self.oldest_number}, the next {self._next}")
        first = number - self.oldest_number
        return list(itertools.islice(self._batches, first, first + limit))

    def store(self, executor_id: str, event: Stored) -> None:
        self._batch(executor_id).stored.append(event)

    def remove(self, executor_id: str, event: Removed) -> None:
        batch = self._batch(executor_id)
        if batch.stored:  # which a reader would apply after this one
            batch = self._begin(executor_id)
        batch.removed.append(event)

    def clear(self, executor_id: str) -> None:
        """All content of an executor was dropped."""
        self._begin(executor_id).cleared = True

    def _batch(self, executor_id: str) -> _Open:
        last = self._written[-1] if self._written else None
        if last is None or last.executor_id != executor_id or len(last.removed) + len(last.stored) >= BATCH_LIMIT:
            return self._begin(executor_id)
        return last

    def _begin(self, executor_id: str) -> _Open:
        self._written.append(_Open(executor_id))
        return self._written[-1]


class ExecutorEvents:
    """What an executor's pools write to."""

    def __init__(self, log: EventLog, executor_id: str) -> None:
        self._log = log
        self._executor_id = executor_id

    def stored(self, pool: PoolSpec, key: bytes, parent: bytes, tokens: bytes, adapter: str) -> None:
        self._log.store(self._executor_id, Stored(key, parent, tokens, adapter, pool))

    def removed(self, pool: PoolSpec, key: bytes) -> None:
        self._log.remove(self._executor_id, Removed(key, pool))

    def cleared(self) -> None:
        self._log.clear(self._executor_id)
