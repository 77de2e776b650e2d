"""Block bookkeeping of one pool: reference counts, states, the free list and the order of eviction.

Blocks are indices from 0. A block is in exactly one of three places: free (no content), cached (settled content that
nobody holds) or leased (held at least once). All data lies in arrays, about 18 bytes a block.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class BlockState(enum.IntEnum):
    """What is in a block. Values are those of the wire."""

    FREE = 0
    RESERVED = 1  # held, nothing written
    PENDING = 2  # partly written
    READY = 3  # full and settled


class Taken(NamedTuple):
    """Blocks handed out, and those among them whose cached content was dropped for it."""

    blocks: list[int]
    evicted: list[int]


class Snapshot(NamedTuple):
    """A copy of a pool's books, by block."""

    references: array[int]
    states: bytes
    keyed: bytes


class BlockPool:
    """Owns `count` blocks. Every method either does all it says or raises and changes nothing.

    Free blocks are handed out lowest first at the start, later the most recently freed first, in the order in which
    their last holder used them. Cached blocks go oldest first; a holder's last blocks count as older than its first
    ones, so that a prefix outlives its continuations.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._references = array("i", bytes(4 * count))
        self._states = bytearray(count)
        self._keyed = bytearray(count)
        self._free = array("i", range(count - 1, -1, -1))
        # Cached blocks form a ring, oldest first, through entry `count`, which is no block.
        self._newer = array("i", [count]) * (count + 1)
        self._older = array("i", [count]) * (count + 1)
        self._cached_count = 0

    @property
    def free_count(self) -> int:
        return len(self._free)

    @property
    def cached_count(self) -> int:
        return self._cached_count

    @property
    def available_count(self) -> int:
        """Blocks that can be handed out now."""
        return len(self._free) + self._cached_count

    @property
    def leased_count(self) -> int:
        return self.count - self.available_count

    def idle_among(self, blocks: Sequence[int]) -> int:
        """How many of these blocks nobody holds."""
        references = self._references
        return sum([not references[block] for block in blocks])

    def state(self, block: int) -> BlockState:
        return BlockState(self._states[block])

    def is_keyed(self, block: int) -> bool:
        return bool(self._keyed[block])

    def snapshot(self) -> Snapshot:
        return Snapshot(self._references[:], bytes(self._states), bytes(self._keyed))

    def free_order(self) -> list[int]:
        """Free blocks in the order in which they will be handed out."""
        return list(reversed(self._free))

    def eviction_order(self) -> list[int]:
        """Cached blocks in the order in which they will be evicted."""
        order, block = [], self._newer[self.count]
        while block != self.count:
            order.append(block)
            block = self._newer[block]
        return order

    def oldest(self, count: int) -> list[int]:
        """The first blocks of `eviction_order`, at the cost of these alone."""
        order, block = [], self._newer[self.count]
        while block != self.count and len(order) < count:
            order.append(block)
            block = self._newer[block]
        return order

    def claim(self, blocks: Sequence[int]) -> None:
        """Hands out these distinct free blocks, each held once. Costs as much as there are free ones."""
        chosen = self._distinct_free(blocks)
        self._free = array("i", _without(self._free, chosen))
        for block in blocks:
            self._references[block] = 1
            self._states[block] = BlockState.RESERVED

    def take(self, count: int) -> Taken:
        """Hands out `count` blocks, each held once: free ones first, then the oldest cached ones."""
        if not 0 <= count <= self.available_count:
            raise ValueError(f"{count} blocks asked for, {self.available_count} available")
        from_free = min(count, len(self._free))
        blocks = self._free[len(self._free) - from_free :].tolist()
        blocks.reverse()
        del self._free[len(self._free) - from_free :]
        evicted = []
        for _ in range(count - from_free):
            block = self._newer[self.count]
            self._unlink(block)
            self._keyed[block] = 0
            evicted.append(block)
        blocks += evicted
        for block in blocks:
            self._references[block] = 1
            self._states[block] = BlockState.RESERVED
        return Taken(blocks, evicted)

    def hold(self, blocks: Sequence[int]) -> None:
        """Adds a holder to each of these blocks, all of which are held or cached."""
        references, keyed = self._references, self._keyed
        for block in blocks:
            if not references[block] and not keyed[block]:
                raise ValueError(f"block {block} is free: it cannot be shared")
        for block in blocks:
            if not references[block]:
                self._unlink(block)
            references[block] += 1

    def drop(self, block: int) -> None:
        """Takes a holder away. The last one leaves a keyed block cached, as the newest, and any other block free."""
        count = self._references[block]
        if count <= 0:
            raise ValueError(f"block {block} is not held: freed twice")
        self._references[block] = count - 1
        if count == 1:
            if self._keyed[block]:
                self._link_newest(block)
            else:
                self._states[block] = BlockState.FREE
                self._free.append(block)

    def advance(self, block: int, state: BlockState) -> None:
        """Moves a held block forward: reserved, pending, ready."""
        if self._references[block] <= 0 or state < self._states[block]:
            raise ValueError(f"block {block} cannot become {state.name} from {self.state(block).name}")
        self._states[block] = state

    def keep(self, block: int) -> None:
        """Marks a held, ready block as keyed: it stays cached when its last holder leaves."""
        if self._references[block] <= 0 or self._states[block] != BlockState.READY:
            raise ValueError(f"block {block} is not ready and held: it cannot be keyed")
        self._keyed[block] = 1

    def forget(self, block: int) -> None:
        """Undoes `keep`: a cached block becomes free, a held one will when its last holder leaves."""
        if not self._keyed[block]:
            raise ValueError(f"block {block} is not keyed")
        self._keyed[block] = 0
        if self._references[block] == 0:
            self._unlink(block)
            self._states[block] = BlockState.FREE
            self._free.append(block)

    def touch(self, block: int) -> None:
        """Makes a cached block the newest; does nothing to others."""
        if self._references[block] == 0 and self._keyed[block]:
            self._unlink(block)
            self._link_newest(block)

    def restore(self, blocks: Sequence[int]) -> None:
        """Makes distinct free blocks cached ones, oldest first: content known from before."""
        chosen = self._distinct_free(blocks)
        self._free = array("i", _without(self._free, chosen))
        for block in blocks:
            self._states[block] = BlockState.READY
            self._keyed[block] = 1
            self._link_newest(block)

    def _distinct_free(self, blocks: Sequence[int]) -> set[int]:
        chosen = set(blocks)
        if len(chosen) != len(blocks) or any(self._states[b] != BlockState.FREE for b in chosen):
            raise ValueError("these blocks are not distinct and free")
        return chosen

    def _link_newest(self, block: int) -> None:
        newest = self._older[self.count]
        self._newer[newest] = self._older[self.count] = block
        self._older[block], self._newer[block] = newest, self.count
        self._cached_count += 1

    def _unlink(self, block: int) -> None:
        older, newer = self._older[block], self._newer[block]
        self._newer[older], self._older[newer] = newer, older
        self._cached_count -= 1


def _without(blocks: Iterable[int], unwanted: set[int]) -> Iterable[int]:
    return (block for block in blocks if block not in unwanted)
