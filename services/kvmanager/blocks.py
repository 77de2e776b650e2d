"""Block bookkeeping of one pool: reference counts, states, owners and the free list.

Blocks are indices from 0. A block is in exactly one of three places: free (no content), cached (settled content that
nobody holds) or leased (held at least once). All data lies in arrays, with the policy's about 31 bytes a block.
"""

from __future__ import annotations

import enum
import itertools
from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from services.kvmanager.eviction import EvictionPolicy, LeafLru, PolicyFactory

UNOWNED = 0
"""The owner of content whose owner is not known."""


class BlockState(enum.IntEnum):
    """What is in a block. Values are those of the wire."""

    FREE = 0
    RESERVED = 1  # held, nothing written
    PENDING = 2  # partly written
    READY = 3  # full and settled


class Taken(NamedTuple):
    """Blocks handed out, and those among them whose cached content was dropped for it, with their owners till then."""

    blocks: list[int]
    evicted: list[int]
    losers: list[int]  # parallel to `evicted`


class Snapshot(NamedTuple):
    """A copy of a pool's books, by block."""

    references: array[int]
    states: bytes
    keyed: bytes


class BlockPool:
    """Owns `count` blocks. Every method either does all it says or raises and changes nothing.

    Free blocks are handed out lowest first at the start, later the most recently freed first, in the order in which
    their last holder used them. After them go cached blocks, in the policy's order.
    """

    def __init__(self, count: int, policy: PolicyFactory = LeafLru) -> None:
        self.count = count
        self.owned_counts = array("i", [0])  # blocks held or cached, by owner
        self._references = array("i", bytes(4 * count))
        self._states = bytearray(count)
        self._keyed = bytearray(count)
        self._owners = array("i", bytes(4 * count))
        self._free = array("i", range(count - 1, -1, -1))
        self.policy: EvictionPolicy = policy(count, self._owners)

    @property
    def free_count(self) -> int:
        return len(self._free)

    @property
    def cached_count(self) -> int:
        return self.policy.idle_count

    @property
    def available_count(self) -> int:
        """Blocks that can be handed out now: free ones, and cached ones that are not pinned."""
        return len(self._free) + self.policy.idle_count - self.policy.pinned_count

    @property
    def leased_count(self) -> int:
        return self.count - len(self._free) - self.policy.idle_count

    def is_idle(self, block: int) -> bool:
        """Whether a block is cached: it has content and nobody holds it."""
        return bool(self._keyed[block]) and not self._references[block]

    def evictable_among(self, blocks: Sequence[int]) -> int:
        """How many of these held or cached blocks could be handed out now."""
        references, pinned = self._references, self.policy.is_pinned
        if self.policy.pinned_count:
            return sum([not references[block] and not pinned(block) for block in blocks])
        return sum([not references[block] for block in blocks])

    def state(self, block: int) -> BlockState:
        return BlockState(self._states[block])

    def are_keyed(self, blocks: Iterable[int]) -> bool:
        return all(map(self._keyed.__getitem__, blocks))

    def is_keyed(self, block: int) -> bool:
        return bool(self._keyed[block])

    def snapshot(self) -> Snapshot:
        return Snapshot(self._references[:], bytes(self._states), bytes(self._keyed))

    def free_order(self) -> list[int]:
        """Free blocks in the order in which they will be handed out."""
        return list(reversed(self._free))

    def eviction_order(self) -> list[int]:
        """Cached blocks in the policy's order, pinned ones last."""
        return list(self.policy.order())

    def oldest(self, count: int) -> list[int]:
        """The first blocks of `eviction_order` that are not pinned, at the cost of these alone."""
        return list(itertools.islice(self.policy.order(), min(count, self.cached_count - self.policy.pinned_count)))

    def owner(self, block: int) -> int:
        return self._owners[block]

    def take(self, count: int, owner: int = UNOWNED) -> Taken:
        """Hands out `count` blocks, each held once by the owner: free ones first, then cached ones."""
        if not 0 <= count <= self.available_count:
            raise ValueError(f"{count} blocks asked for, {self.available_count} available")
        from_free = min(count, len(self._free))
        blocks = self._free[len(self._free) - from_free :].tolist()
        blocks.reverse()
        del self._free[len(self._free) - from_free :]
        owners = self._owners
        evicted = self.policy.evict(count - from_free, owner)
        losers = [owners[block] for block in evicted]
        for block, loser in zip(evicted, losers, strict=True):
            self._keyed[block] = 0
            self.owned_counts[loser] -= 1
        blocks += evicted
        for block in blocks:
            self._references[block] = 1
            self._states[block] = BlockState.RESERVED
            owners[block] = owner
        self._own(owner, count)
        return Taken(blocks, evicted, losers)

    def claim(self, blocks: Sequence[int], owner: int = UNOWNED) -> None:
        """Hands out these distinct free blocks, each held once. Costs as much as there are free ones."""
        self._take_out(blocks)
        for block in blocks:
            self._references[block] = 1
            self._states[block] = BlockState.RESERVED
            self._owners[block] = owner
        self._own(owner, len(blocks))

    def hold(self, blocks: Sequence[int]) -> None:
        """Adds a holder to each of these blocks, all of which are held or cached."""
        references, keyed = self._references, self._keyed
        for block in blocks:
            if not references[block] and not keyed[block]:
                raise ValueError(f"block {block} is free: it cannot be shared")
        idle = []
        for block in blocks:
            if not references[block]:
                idle.append(block)
            references[block] += 1
        self.policy.remove(idle)

    def adopt(self, blocks: Sequence[int], owner: int) -> None:
        """Gives held blocks without known owner this one."""
        for block in blocks:
            if self._owners[block] == UNOWNED and self._references[block]:
                self._owners[block] = owner
                self.owned_counts[UNOWNED] -= 1
                self._own(owner, 1)

    def drop(self, block: int, priority: int = 0, pin_end: float = 0.0) -> None:
        """Takes a holder away, who wants at least so much for the block's content.

        The last one leaves a keyed block cached, as the newest, and any other block free.
        """
        count = self._references[block]
        if count <= 0:
            raise ValueError(f"block {block} is not held: freed twice")
        self._references[block] = count - 1
        if self._keyed[block]:
            if priority or pin_end:
                self.policy.retain(block, priority, pin_end)
            if count == 1:
                self.policy.add((block,))
        elif count == 1:
            self._release(block)

    def drop_all(self, blocks: Sequence[int], priority: int = 0, pin_end: float = 0.0) -> None:
        """As `drop` for each of these distinct blocks, which have content, in this order."""
        references, policy = self._references, self.policy
        if len(set(blocks)) < len(blocks) or not all(map(references.__getitem__, blocks)) or not self.are_keyed(blocks):
            raise ValueError("these blocks are not distinct and held with content: freed twice")
        if priority or pin_end:
            for block in blocks:
                policy.retain(block, priority, pin_end)
        idle = []
        for block in blocks:
            references[block] -= 1
            if not references[block]:
                idle.append(block)
        policy.add(idle)

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
            self.policy.remove([block])
            self._release(block)
        self.policy.forget(block)

    def touch(self, block: int, priority: int = 0, pin_end: float = 0.0) -> None:
        """Counts a keyed block as used, as if a holder had dropped it; does nothing to others."""
        if not self._keyed[block]:
            return
        is_idle = not self._references[block]
        if is_idle:
            self.policy.remove([block])
        self.policy.retain(block, priority, pin_end)
        if is_idle:
            self.policy.add((block,))

    def restore(self, blocks: Sequence[int]) -> None:
        """Makes distinct free blocks cached ones, oldest first: content known from before."""
        self._take_out(blocks)
        for block in blocks:
            self._states[block] = BlockState.READY
            self._keyed[block] = 1
            self._owners[block] = UNOWNED
        self.policy.add(blocks)
        self._own(UNOWNED, len(blocks))

    def _take_out(self, blocks: Sequence[int]) -> None:
        """Takes these blocks, which must be distinct and free, off the free list."""
        chosen = set(blocks)
        if len(chosen) != len(blocks) or any(self._states[b] != BlockState.FREE for b in chosen):
            raise ValueError("these blocks are not distinct and free")
        self._free = array("i", [block for block in self._free if block not in chosen])

    def _own(self, owner: int, count: int) -> None:
        missing = owner + 1 - len(self.owned_counts)
        if missing > 0:
            self.owned_counts.extend([0] * missing)
        self.owned_counts[owner] += count

    def _release(self, block: int) -> None:
        self._states[block] = BlockState.FREE
        self._free.append(block)
        self.owned_counts[self._owners[block]] -= 1
