"""Counts of what a pool's cache is good for: by namespace, and how long blocks live and wait."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

BOUNDS = tuple(step * 10.0**power for power in range(-2, 5) for step in (1, 2, 5))
"""Upper bounds in seconds: 10 ms to about 14 hours."""
NAMESPACE_LIMIT = 1024
"""Namespaces without blocks are forgotten beyond about this many."""


class Histogram:
    """Counts of durations in seconds."""

    def __init__(self) -> None:
        self.total = 0.0
        self.counts = [0] * (len(BOUNDS) + 1)  # up to each bound; the last is what lies beyond

    def observe(self, seconds: float, count: int = 1) -> None:
        self.counts[bisect_left(BOUNDS, seconds)] += count
        self.total += seconds * count

    def cumulative(self) -> list[tuple[str, int]]:
        """Counts up to each bound, as Prometheus has them."""
        found, total = [], 0
        for bound, count in zip((*map(str, BOUNDS), "+Inf"), self.counts, strict=True):
            total += count
            found.append((bound, total))
        return found


@dataclass(slots=True)
class Clock:
    """The present time, in seconds. It never runs back."""

    now: float = 0.0

    def pass_time(self, now: float) -> None:
        self.now = max(self.now, now)


@dataclass(slots=True)
class NamespaceUse:
    """What a namespace asked of a pool. Misses are what was looked up and not found."""

    query_tokens: int = 0
    hit_tokens: int = 0
    evicted_count: int = 0  # of its blocks


class Namespaces:
    """Small numbers for the namespaces that own blocks, and what each used. Number 0 stands for none.

    Where a namespace is forgotten, its counts go to `others`, and its number to the next one that comes.
    """

    def __init__(self) -> None:
        self.others = NamespaceUse()
        self._owner_by_name: dict[str, int] = {}
        self._uses = [NamespaceUse()]
        self._unused: list[int] = []
        self._sweep_at = NAMESPACE_LIMIT

    def owner(self, name: str) -> int | None:
        return self._owner_by_name.get(name)

    def use(self, owner: int) -> NamespaceUse:
        return self._uses[owner]

    def items(self) -> Iterator[tuple[str, int]]:
        """Names with their numbers."""
        return iter(list(self._owner_by_name.items()))

    def open(self, name: str) -> int:
        """A number for a new name."""
        if self._unused:
            owner = self._unused.pop()
            self._uses[owner] = NamespaceUse()
        else:
            owner = len(self._uses)
            self._uses.append(NamespaceUse())
        self._owner_by_name[name] = owner
        return owner

    def sweep(self, block_counts: Sequence[int]) -> list[int]:
        """Where many were opened since the last time, forgets those without blocks and returns their numbers."""
        if len(self._owner_by_name) < self._sweep_at:
            return []
        gone = [(name, owner) for name, owner in self._owner_by_name.items() if not _at(block_counts, owner)]
        for name, owner in gone:
            del self._owner_by_name[name]
            use = self._uses[owner]
            self.others.query_tokens += use.query_tokens
            self.others.hit_tokens += use.hit_tokens
            self.others.evicted_count += use.evicted_count
        numbers = [owner for _, owner in gone]
        self._unused += numbers
        self._sweep_at = max(NAMESPACE_LIMIT, 2 * len(self._owner_by_name))
        return numbers


class Times:
    """When each block got its content and was last used, and what follows when it is used again or evicted."""

    def __init__(self, count: int) -> None:
        self.lifetime = Histogram()  # of evicted content
        self.idle_before_eviction = Histogram()
        self.reuse_gap = Histogram()  # of prefixes: since the last use of the deepest block that was found
        self._stored = array("d", bytes(8 * count))
        self._used = array("d", bytes(8 * count))

    def stored(self, block: int, now: float) -> None:
        self._stored[block] = self._used[block] = now

    def used(self, blocks: Iterable[int], now: float) -> None:
        used = self._used
        for block in blocks:
            used[block] = now

    def found(self, block: int, now: float) -> None:
        self.reuse_gap.observe(now - self._used[block])

    def evicted(self, blocks: Iterable[int], now: float) -> None:
        for (stored, used), count in Counter((self._stored[block], self._used[block]) for block in blocks).items():
            self.lifetime.observe(now - stored, count)
            self.idle_before_eviction.observe(now - used, count)


def _at(counts: Sequence[int], owner: int) -> int:
    return counts[owner] if owner < len(counts) else 0
