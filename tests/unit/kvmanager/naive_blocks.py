"""The rules of a block pool in plain lists, each looked through in whole."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class NaiveBlock:
    holders: int = 0
    has_content: bool = False
    owner: int = 0
    priority: int = 0
    pin_end: float = 0.0


@dataclass
class NaiveBlockPool:
    """`queue` and `pinned` hold idle blocks in the order in which they came."""

    count: int
    quotas: dict[int, int]
    now: float = 0.0
    blocks: list[NaiveBlock] = field(default_factory=list)
    free: list[int] = field(default_factory=list)
    queue: list[int] = field(default_factory=list)
    pinned: list[int] = field(default_factory=list)
    above: list[int] = field(default_factory=list)  # owners, in the order in which they came to exceed their quotas

    def __post_init__(self) -> None:
        self.blocks = [NaiveBlock() for _ in range(self.count)]
        self.free = list(range(self.count))

    @property
    def available(self) -> int:
        return len(self.free) + len(self.queue)

    def order(self) -> list[int]:
        by_priority = sorted(self.queue, key=lambda block: self.blocks[block].priority)
        return by_priority + sorted(self.pinned, key=lambda block: self.blocks[block].pin_end)

    def take(self, count: int, owner: int) -> tuple[list[int], list[int]]:
        taken, evicted = [], []
        for _ in range(count):
            if self.free:
                taken.append(self.free.pop(0))
            else:
                taken.append(self.victim(owner))
                evicted.append(taken[-1])
                self.dequeue(taken[-1])
        for block in taken:
            self.blocks[block] = NaiveBlock(holders=1, owner=owner)
        return taken, evicted

    def victim(self, asker: int) -> int:
        loser = asker if asker in self.above else self.above[0] if self.above else None
        return next(block for block in self.order() if loser in (None, self.blocks[block].owner))

    def hold(self, block: int) -> None:
        if self.blocks[block].holders == 0:
            self.dequeue(block)
        self.blocks[block].holders += 1

    def drop(self, block: int, priority: int, pin_end: float) -> None:
        known = self.blocks[block]
        known.holders -= 1
        if known.has_content:
            self.retain(block, priority, pin_end)
        if known.holders == 0:
            self.leave(block)

    def touch(self, block: int, priority: int, pin_end: float) -> None:
        known = self.blocks[block]
        if not known.has_content:
            return
        if known.holders == 0:
            self.dequeue(block)
        self.retain(block, priority, pin_end)
        if known.holders == 0:
            self.leave(block)

    def forget(self, block: int) -> None:
        known = self.blocks[block]
        if known.holders == 0:
            self.dequeue(block)
        known.has_content, known.priority, known.pin_end = False, 0, 0.0
        if known.holders == 0:
            self.leave(block)

    def pass_time(self, now: float) -> None:
        for block in sorted(self.pinned, key=lambda block: self.blocks[block].pin_end):
            if self.blocks[block].pin_end <= now:
                self.unpin(block)
        self.now = now

    def retain(self, block: int, priority: int, pin_end: float) -> None:
        known = self.blocks[block]
        known.priority, known.pin_end = max(known.priority, priority), max(known.pin_end, pin_end)

    def leave(self, block: int) -> None:
        known = self.blocks[block]
        if not known.has_content:
            self.free.insert(0, block)
        elif known.pin_end > self.now:
            self.pinned.append(block)
            if len(self.pinned) > self.count // 2:
                self.unpin(min(self.pinned, key=lambda block: self.blocks[block].pin_end))
        else:
            self.queue.append(block)
        self.compare_with_quotas()

    def unpin(self, block: int) -> None:
        self.pinned.remove(block)
        self.blocks[block].pin_end = 0.0
        self.queue.append(block)
        self.compare_with_quotas()

    def dequeue(self, block: int) -> None:
        for blocks in (self.queue, self.pinned):
            if block in blocks:
                blocks.remove(block)
        self.compare_with_quotas()

    def compare_with_quotas(self) -> None:
        for owner, quota in self.quotas.items():
            exceeds = sum(self.blocks[block].owner == owner for block in self.queue) > quota
            if exceeds and owner not in self.above:
                self.above.append(owner)
            if not exceeds and owner in self.above:
                self.above.remove(owner)
