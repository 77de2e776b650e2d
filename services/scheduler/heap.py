"""A heap whose items may die where they are: skipped when they come up, and swept before they outnumber the living."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=tuple[float, ...])
Item = TypeVar("Item")

SWEEP_FROM = 256


class LazyHeap(Generic[Key, Item]):
    """Smallest key first; keys are distinct. What is dead stays dead, and is held no longer than twice the living."""

    def __init__(self, is_dead: Callable[[Item], bool]) -> None:
        self._is_dead = is_dead
        self._entries: list[tuple[Key, Item]] = []
        self._sweep_at = SWEEP_FROM

    def __len__(self) -> int:
        """Items held, dead ones included."""
        return len(self._entries)

    def push(self, key: Key, item: Item) -> None:
        heapq.heappush(self._entries, (key, item))
        if len(self._entries) > self._sweep_at:
            self._entries = [entry for entry in self._entries if not self._is_dead(entry[1])]
            heapq.heapify(self._entries)
            self._sweep_at = max(SWEEP_FROM, 2 * len(self._entries))

    def peek(self) -> tuple[Key, Item] | None:
        """The first living one, still held."""
        while self._entries and self._is_dead(self._entries[0][1]):
            heapq.heappop(self._entries)
        return self._entries[0] if self._entries else None

    def __iter__(self) -> Iterator[tuple[Key, Item]]:
        """All living ones, in no order."""
        return (entry for entry in self._entries if not self._is_dead(entry[1]))

    def pop(self) -> Item:
        """Takes out the one that `peek` returned."""
        return heapq.heappop(self._entries)[1]
