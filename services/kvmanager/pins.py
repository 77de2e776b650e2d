"""Idle blocks that are not to be evicted before a given time."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from services.kvmanager.rings import Rings

STALE_ENDS = 64
"""So many ends without blocks are kept at least, so that clearing them up costs next to nothing an operation."""


class Pins:
    """One ring of blocks for each time at which pins end. Logarithmic in the number of such times."""

    def __init__(self, rings: Rings) -> None:
        self.count = 0
        self._rings = rings
        self._ring_by_end: dict[float, int] = {}
        self._ends: list[float] = []  # a heap: those above, and some that are gone

    def add(self, block: int, end: float) -> None:
        """Pins a block that is in no ring until `end`."""
        ring = self._ring_by_end.get(end)
        if ring is None:
            ring = self._ring_by_end[end] = self._rings.open()
            if len(self._ends) > 2 * len(self._ring_by_end) + STALE_ENDS:
                self._ends = sorted(self._ring_by_end)
            else:
                heapq.heappush(self._ends, end)
        self._rings.append(ring, block)
        self.count += 1

    def removed(self, end: float) -> None:
        """A block that was pinned until `end` has left its ring."""
        self.count -= 1
        ring = self._ring_by_end[end]
        if self._rings.is_empty(ring):
            self._rings.close(ring)
            del self._ring_by_end[end]

    def next_end(self) -> float | None:
        """The first time at which a pin ends; None without pins."""
        while self._ends and self._ends[0] not in self._ring_by_end:
            heapq.heappop(self._ends)
        return self._ends[0] if self._ends else None

    def pop(self) -> int:
        """Takes out the block whose pin ends first, of several the one that was pinned first."""
        end = self.next_end()
        if end is None:
            raise ValueError("no block is pinned")
        block = next(self._rings.blocks(self._ring_by_end[end]))
        self._rings.remove(block)
        self.removed(end)
        return block

    def blocks(self) -> Iterator[int]:
        """All pinned blocks in the order in which `pop` would give them."""
        for _, ring in sorted(self._ring_by_end.items()):
            yield from self._rings.blocks(ring)
