"""Which cached block goes next: the oldest of the lowest priority, unless a pin or a quota says otherwise."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from services.kvmanager.pins import Pins
from services.kvmanager.rings import PriorityQueue, Rings
from services.kvmanager.shares import Shares

PIN_SHARE = 0.5
"""The part of a pool that pinned blocks can take."""


class EvictionPolicy(Protocol):
    """Orders the idle blocks of a pool: those with content that nobody holds. Times are seconds of one clock."""

    @property
    def idle_count(self) -> int: ...

    @property
    def pinned_count(self) -> int:
        """Those among them that cannot be evicted now."""

    def is_pinned(self, block: int) -> bool:
        """Whether an idle block cannot be evicted now."""

    def add(self, blocks: Sequence[int]) -> None:
        """Blocks became idle, the last one last: they were used just now."""

    def remove(self, blocks: Sequence[int]) -> None:
        """Idle blocks are so no more."""

    def evict(self, count: int, asker: int) -> list[int]:
        """Chooses blocks in favour of that owner, removes and forgets them. Only asked where so many can be evicted."""

    def retain(self, block: int, priority: int, pin_end: float) -> None:
        """A user of a block that is not idle wants at least so much for it."""

    def forget(self, block: int) -> None:
        """A block that is not idle lost its content, and what was wanted for it."""

    def may_pin(self, owner: int) -> bool:
        """Whether the owner's quota leaves room for pins."""

    def set_quota(self, owner: int, blocks: int) -> None:
        """An owner without blocks gets a quota of evictable ones, above which it loses some before others do."""

    def drop_quota(self, owner: int) -> None:
        """Undoes `set_quota` of an owner without blocks; does nothing where it has no quota."""

    def pass_time(self, now: float) -> None:
        """Pins that end by `now` are over. Earlier times than before change nothing."""

    def next_pin_end(self) -> float | None:
        """When more can be evicted though nobody gives anything back; None for never."""

    def order(self) -> Iterator[int]:
        """Idle blocks as they would be evicted without quotas; pinned ones last, in the order of their ends."""


PolicyFactory = Callable[[int, Sequence[int]], EvictionPolicy]
"""Makes a policy for so many blocks, given the owner of each as the pool keeps it."""


class LeafLru:
    """Least recently used first. Constant time; with pins logarithmic in the number of different times they end at.

    Who leaves content drops its last block first, and wants as much for its first ones as for those behind them. So a
    prefix is always younger, and worth more, than its continuations: leaves go before what they build on.

    A block becomes the newest of its priority when its pin ends. Where pins would take more than their part of the
    pool, those that end first are over at once.
    """

    def __init__(self, count: int, owners: Sequence[int]) -> None:
        self._owners = owners
        self._pin_limit = int(PIN_SHARE * count)
        self._idle_count = 0
        self._now = 0.0
        self._rings = Rings(count)
        self._queue = PriorityQueue(self._rings)
        self._pins = Pins(self._rings)
        self._shares = Shares(count)
        self._priorities = bytearray(count)
        self._pin_ends = array("d", bytes(8 * count))
        self._last_pin_end = 0.0

    @property
    def idle_count(self) -> int:
        return self._idle_count

    @property
    def pinned_count(self) -> int:
        return self._pins.count

    def is_pinned(self, block: int) -> bool:
        return self._pin_ends[block] > self._now

    def add(self, blocks: Sequence[int]) -> None:
        self._idle_count += len(blocks)
        if self._last_pin_end <= self._now and not self._shares.exist:
            for priority, alike in itertools.groupby(blocks, self._priorities.__getitem__):
                self._queue.append_all(alike, priority)
            return
        for block in blocks:
            end = self._pin_ends[block]
            if end <= self._now:
                self._enqueue(block)
            else:
                self._pin(block, end)

    def remove(self, blocks: Sequence[int]) -> None:
        self._idle_count -= len(blocks)
        if not self._pins.count and not self._shares.exist:
            self._rings.remove_all(blocks)
            return
        for block in blocks:
            self._rings.remove(block)
            if self.is_pinned(block):
                self._pins.removed(self._pin_ends[block])
                self._shares.pin(self._owners[block], -1)
            else:
                self._shares.remove(block, self._owners[block])

    def evict(self, count: int, asker: int) -> list[int]:
        if self._shares.exist:
            evicted = [self._evict_by_quota(asker) for _ in range(count)]
        else:
            evicted = list(itertools.islice(self._queue.blocks(), count))
            self._rings.remove_all(evicted)
        self._idle_count -= count
        for block in evicted:
            self._priorities[block] = 0
            self._pin_ends[block] = 0.0
        return evicted

    def retain(self, block: int, priority: int, pin_end: float) -> None:
        self._priorities[block] = max(self._priorities[block], priority)
        self._pin_ends[block] = max(self._pin_ends[block], pin_end)
        self._last_pin_end = max(self._last_pin_end, pin_end)

    def forget(self, block: int) -> None:
        self._priorities[block] = 0
        self._pin_ends[block] = 0.0

    def may_pin(self, owner: int) -> bool:
        return self._shares.may_pin(owner)

    def set_quota(self, owner: int, blocks: int) -> None:
        self._shares.open(owner, blocks)

    def drop_quota(self, owner: int) -> None:
        self._shares.close(owner)

    def pass_time(self, now: float) -> None:
        end = self._pins.next_end()
        while end is not None and end <= now:
            self._end_pin()
            end = self._pins.next_end()
        self._now = max(self._now, now)

    def next_pin_end(self) -> float | None:
        return self._pins.next_end()

    def order(self) -> Iterator[int]:
        yield from self._queue.blocks()
        yield from self._pins.blocks()

    def _evict_by_quota(self, asker: int) -> int:
        block = self._shares.first(asker)
        if block is None:
            block = self._queue.first()
        if block is None:
            raise ValueError("no block can be evicted")
        self._rings.remove(block)
        self._shares.remove(block, self._owners[block])
        return block

    def _pin(self, block: int, end: float) -> None:
        self._pins.add(block, end)
        self._shares.pin(self._owners[block], 1)
        if self._pins.count > self._pin_limit:
            self._end_pin()

    def _enqueue(self, block: int) -> None:
        priority = self._priorities[block]
        self._queue.append(block, priority)
        self._shares.add(block, self._owners[block], priority)

    def _end_pin(self) -> None:
        block = self._pins.pop()
        self._pin_ends[block] = 0.0
        self._shares.pin(self._owners[block], -1)
        self._enqueue(block)


POLICIES: Mapping[str, PolicyFactory] = {"lru": LeafLru}
"""By name."""
