"""Ordered sets of blocks with constant-time changes: rings of links in two shared arrays."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator

from services.kvmanager.retention import PRIORITIES


class Rings:
    """Rings of the blocks 0 to `count` - 1, oldest first, each block in one ring at most. Eight bytes a block.

    A ring is named by an entry of the arrays beyond the blocks', through which it closes.
    """

    def __init__(self, count: int) -> None:
        self._newer = array("i", bytes(4 * count))
        self._older = array("i", bytes(4 * count))
        self._closed: list[int] = []

    def open(self) -> int:
        """A new, empty ring."""
        if self._closed:
            return self._closed.pop()
        ring = len(self._newer)
        self._newer.append(ring)
        self._older.append(ring)
        return ring

    def close(self, ring: int) -> None:
        """Gives an empty ring's name back."""
        if not self.is_empty(ring):
            raise ValueError(f"ring {ring} holds blocks")
        self._closed.append(ring)

    def append(self, ring: int, block: int) -> None:
        """Makes a block that is in no ring the newest of this one."""
        newest = self._older[ring]
        self._newer[newest] = self._older[ring] = block
        self._older[block], self._newer[block] = newest, ring

    def remove(self, block: int) -> None:
        """Takes a block out of the ring that it is in."""
        older, newer = self._older[block], self._newer[block]
        self._newer[older], self._older[newer] = newer, older

    def append_all(self, ring: int, blocks: Iterable[int]) -> None:
        """As `append` for each block in this order."""
        newer, older = self._newer, self._older
        newest = older[ring]
        for block in blocks:
            newer[newest], older[block] = block, newest
            newest = block
        newer[newest], older[ring] = ring, newest

    def remove_all(self, blocks: Iterable[int]) -> None:
        """As `remove` for each block."""
        newers, olders = self._newer, self._older
        for block in blocks:
            older, newer = olders[block], newers[block]
            newers[older], olders[newer] = newer, older

    def is_empty(self, ring: int) -> bool:
        return self._newer[ring] == ring

    def oldest(self, ring: int) -> int | None:
        """None in an empty ring."""
        block = self._newer[ring]
        return block if block != ring else None

    def blocks(self, ring: int) -> Iterator[int]:
        """All blocks, oldest first."""
        block = self._newer[ring]
        while block != ring:
            yield block
            block = self._newer[block]


class PriorityQueue:
    """Blocks by priority, and by age within one: a ring for each priority that was used."""

    def __init__(self, rings: Rings) -> None:
        self._rings = rings
        self._ring_of: list[int | None] = [None] * PRIORITIES
        self._occupied = 0  # bit p: the ring of priority p may hold something

    def append(self, block: int, priority: int) -> None:
        """Makes a block that is in no ring the newest of its priority."""
        self.append_all((block,), priority)

    def append_all(self, blocks: Iterable[int], priority: int) -> None:
        """As `append` for each block in this order."""
        ring = self._ring_of[priority]
        if ring is None:
            ring = self._ring_of[priority] = self._rings.open()
        self._rings.append_all(ring, blocks)
        self._occupied |= 1 << priority

    def remove(self, block: int) -> None:
        self._rings.remove(block)

    def first(self) -> int | None:
        """The oldest block of the lowest priority; None where there is no block."""
        while self._occupied:
            lowest = self._occupied & -self._occupied
            ring = self._ring_of[lowest.bit_length() - 1]
            block = None if ring is None else self._rings.oldest(ring)
            if block is not None:
                return block
            self._occupied ^= lowest
        return None

    def blocks(self) -> Iterator[int]:
        """All blocks in the order in which `first` would give them."""
        for ring in self._ring_of:
            if ring is not None:
                yield from self._rings.blocks(ring)

    def close(self) -> None:
        """Gives the rings back; all are empty."""
        for ring in self._ring_of:
            if ring is not None:
                self._rings.close(ring)
