"""Colder copies of a sequence's blocks: which its growth needs, and the changes of its block table to them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from services.common.kv_policy import Change
from services.kvmanager.pools import Pool


class Demotion(NamedTuple):
    """Where `length` tokens have KV, `position` names `block` in the pool of `age`."""

    length: int
    position: int
    age: int
    block: int
    writes: bool  # the executor writes the copy; else another sequence did


class CopyPlan:
    """What changes of a block table take. Copies that exist are found by their key; nothing changes before `take`."""

    def __init__(self, ages: Sequence[Pool], changes: Iterable[Change], key_of: Callable[[int], bytes | None]) -> None:
        """`ages`: the group's pools, hot first. `key_of` gives a position's key, None where it is not known yet."""
        self.found: list[list[int]] = [[] for _ in ages]
        self.fresh = [0] * len(ages)
        self._ages = ages
        self._entries: list[tuple[Change, int | None]] = []
        for change in changes:
            key = key_of(change.position)
            block = None if key is None else ages[change.age].index.find(key)
            self._entries.append((change, block))
            if block is None:
                self.fresh[change.age] += 1
            else:
                self.found[change.age].append(block)

    def count(self, age: int) -> int:
        """Blocks of that age."""
        return len(self.found[age]) + self.fresh[age]

    @property
    def fits(self) -> bool:
        """Whether every pool has room now."""
        return all(
            pool.room_beside(found) >= fresh
            for pool, found, fresh in zip(self._ages[1:], self.found[1:], self.fresh[1:], strict=True)
        )

    def take(self, namespace: str) -> list[Demotion]:
        """Holds what was found and takes the rest; the caller has checked the room."""
        taken = [
            iter(pool.acquire(found, fresh, namespace)[len(found) :])
            for pool, found, fresh in zip(self._ages, self.found, self.fresh, strict=True)
        ]
        return [
            Demotion(*change, next(taken[change.age]), True) if block is None else Demotion(*change, block, False)
            for change, block in self._entries
        ]
