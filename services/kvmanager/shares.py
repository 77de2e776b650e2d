"""Quotas of owners: whose cached blocks go before everybody else's."""

from __future__ import annotations

from dataclasses import dataclass

from services.kvmanager.rings import PriorityQueue, Rings


@dataclass(slots=True)
class Share:
    """What one owner has cached."""

    quota: int  # blocks
    queue: PriorityQueue  # evictable ones
    evictable: int = 0
    pinned: int = 0


class Shares:
    """The owners that have a quota, and those among them that are above it. Eight bytes a block once there is one."""

    def __init__(self, count: int) -> None:
        self.exist = False
        self._count = count
        self._rings: Rings | None = None
        self._by_owner: dict[int, Share] = {}
        self._above: dict[int, Share] = {}  # in the order in which they came to be so

    def open(self, owner: int, quota: int) -> None:
        """Gives an owner that has no blocks a quota."""
        if self._rings is None:
            self._rings = Rings(self._count)
        self.exist = True
        self._by_owner[owner] = Share(quota, PriorityQueue(self._rings))

    def close(self, owner: int) -> None:
        """Undoes `open` of an owner that has no blocks; does nothing without quota."""
        share = self._by_owner.pop(owner, None)
        if share is not None:
            share.queue.close()

    def add(self, block: int, owner: int, priority: int) -> None:
        """The owner's newest evictable block."""
        share = self._by_owner.get(owner)
        if share is not None:
            share.queue.append(block, priority)
            share.evictable += 1
            if share.evictable > share.quota:
                self._above[owner] = share

    def remove(self, block: int, owner: int) -> None:
        """An evictable block of the owner is so no more."""
        share = self._by_owner.get(owner)
        if share is not None:
            share.queue.remove(block)
            share.evictable -= 1
            if share.evictable <= share.quota:
                self._above.pop(owner, None)

    def pin(self, owner: int, change: int) -> None:
        """So many more or fewer blocks of the owner are cached and pinned."""
        share = self._by_owner.get(owner)
        if share is not None:
            share.pinned += change

    def may_pin(self, owner: int) -> bool:
        """Whether what the owner has pinned is within its quota."""
        share = self._by_owner.get(owner)
        return share is None or share.pinned < share.quota

    def first(self, asker: int) -> int | None:
        """The block that a quota gives away: of the asker, else of who has been above it longest. None for none."""
        if not self._above:
            return None
        share = self._above.get(asker)
        return (share or next(iter(self._above.values()))).queue.first()
