"""What a scheduler holds: its sessions, and each sequence's blocks, tokens and keys."""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from services.common.kv_policy import KvPolicy
from services.kvmanager.blocks import BlockState
from services.kvmanager.copies import CopyPlan, Demotion
from services.kvmanager.keys import ROOT, KeySpace, block_keys, pack
from services.kvmanager.pools import Pool
from services.kvmanager.retention import NO_RETENTION, Retention

if TYPE_CHECKING:
    from services.kvmanager.executors import Executor, Place
    from services.kvmanager.reservations import Restated


MOST_TOKENS = 1 << 62


class Refused(ValueError):
    """A malformed, repeated or late message: nothing changed."""


class Sealed(NamedTuple):
    """A block that became full and is now the one of its key."""

    group_id: int
    block_id: int
    key: bytes


@dataclass(slots=True)
class GroupHolding:
    """A sequence's blocks in one cache group. `ages` are the group's pools, hot first."""

    ages: tuple[Pool, ...]
    blocks: list[int]  # in order of position, each within the pool of its age
    keys: list[bytes]  # of the leading, full blocks
    known_keys: list[bytes]  # of full blocks of the tokens that it began with, computed or not
    key_space: KeySpace
    retention: Retention = NO_RETENTION  # of the prompt's blocks
    demoted: dict[int, int] = field(default_factory=dict)  # position -> age, of those that are not hot
    pending: deque[Demotion] = field(default_factory=deque)  # by ascending length

    @property
    def pool(self) -> Pool:
        """The pool of new blocks."""
        return self.ages[0]

    @property
    def slots(self) -> int:
        """Tokens that fit."""
        return len(self.blocks) * self.pool.spec.block_size

    def block_ids(self) -> list[int]:
        """The block table as the executor has it now."""
        if not self.demoted:
            return self.pool.ids(self.blocks)
        first = [pool.spec.first_block_id for pool in self.ages]
        return [first[self.demoted.get(position, 0)] + block for position, block in enumerate(self.blocks)]

    def copies(self, policy: KvPolicy, after: int, through: int) -> CopyPlan:
        """What growing from `after` to `through` slots takes of colder pools."""
        return CopyPlan(self.ages, policy.changes(self.pool.spec.block_size, after, through), self._key)

    def reads(self, pool: Pool, block: int, position: int, key: bytes) -> bool:
        """Whether the table names that block, with this content, at that position: now, or once it changes."""
        if position >= len(self.keys) or self.keys[position] != key:
            return False
        return (self.blocks[position] == block and self.ages[self.demoted.get(position, 0)] is pool) or any(
            (d.position, d.block, d.writes) == (position, block, False) and self.ages[d.age] is pool
            for d in self.pending
        )

    def needs(self, count: int, plan: CopyPlan | None) -> list[int]:
        """Blocks of each age that the sequence has with `count` more, at least: once all its slots are computed."""
        ages = dict(self.demoted)
        needed = [len(self.blocks) + count, *(0 for _ in self.ages[1:])]
        for demotion in self.pending:
            if demotion.length < self.slots:
                ages[demotion.position] = demotion.age
            else:
                needed[demotion.age] += 1  # is held beside what it follows
        for age in ages.values():
            needed[0] -= 1
            needed[age] += 1
        if plan is not None:
            needed = [need + plan.count(age) for age, need in enumerate(needed)]
        return needed

    def fits_ever(self, count: int, plan: CopyPlan | None) -> bool:
        """Whether the pools are large enough for so many more blocks and the copies that they take."""
        return all(need <= pool.blocks.count for need, pool in zip(self.needs(count, plan), self.ages, strict=True))

    def settle(self, tokens: array[int], computed: int) -> list[Sealed]:
        """Keys the blocks wholly below `computed`, then applies the demotions that lie behind it."""
        pool, first = self.pool, len(self.keys)
        size = pool.spec.block_size
        full, part = divmod(computed, size)
        sealed = []
        if full > first:
            packed = pack(tokens, first * size, full * size)
            parent = self.keys[-1] if self.keys else ROOT
            for at, key in enumerate(self._new_keys(packed, full, parent)):
                block, width = self.blocks[first + at], 4 * size
                self.keys.append(key)
                if pool.settle(block, key, parent, packed[at * width : (at + 1) * width], self.key_space.adapter):
                    sealed.append(Sealed(pool.spec.group_id, pool.spec.first_block_id + block, key))
                parent = key
        if part:
            pool.blocks.advance(self.blocks[full], BlockState.PENDING)
        while self.pending and self.pending[0].length < computed:
            sealed += self._demote(self.pending.popleft(), tokens)
        return sealed

    def release(self) -> None:
        """Gives all blocks back; the holding is of no use afterwards."""
        for demotion in self.pending:
            self.ages[demotion.age].release([demotion.block], ())
        if not self.demoted:
            self.pool.release(self.blocks, self.keys, self.retention, len(self.known_keys))
            return
        for age, pool in enumerate(self.ages):
            positions = [p for p in range(len(self.blocks)) if self.demoted.get(p, 0) == age]
            keys = [self.keys[p] for p in positions if p < len(self.keys)]
            retained = sum(p < len(self.known_keys) for p in positions)
            pool.release([self.blocks[p] for p in positions], keys, self.retention, retained)

    def _new_keys(self, packed: bytes, full: int, parent: bytes) -> list[bytes]:
        """Keys of the blocks from `keys` on up to `full`, whose tokens are `packed`."""
        first, size = len(self.keys), self.pool.spec.block_size
        known = self.known_keys[first:full]
        if first + len(known) == full:
            return known
        rest = packed[4 * size * len(known) :]
        prefix = self.key_space.prefix(self.pool.spec.group_id)
        return known + block_keys(prefix, known[-1] if known else parent, rest, size)

    def _demote(self, demotion: Demotion, tokens: array[int]) -> list[Sealed]:
        position, age, block = demotion.position, demotion.age, demotion.block
        key, colder = self.keys[position], self.ages[age]
        self.ages[self.demoted.get(position, 0)].release([self.blocks[position]], [key])
        self.blocks[position], self.demoted[position] = block, age
        if not demotion.writes:
            return []
        parent, size = self.keys[position - 1], colder.spec.block_size  # a first block stays hot
        packed = pack(tokens, position * size, (position + 1) * size)
        if not colder.settle(block, key, parent, packed, self.key_space.adapter):
            return []
        return [Sealed(colder.spec.group_id, colder.spec.first_block_id + block, key)]

    def _key(self, position: int) -> bytes | None:
        for keys in (self.keys, self.known_keys):
            if position < len(keys):
                return keys[position]
        return None


@dataclass(slots=True, eq=False)
class Holding:
    """One sequence. `computed` tokens have KV: blocks wholly below are ready, the one it ends in is pending."""

    sequence_id: int
    session: Session = field(repr=False)
    executor: Executor = field(repr=False)
    place: Place = field(repr=False)
    epoch: int
    tokens: array[int]  # prompt and output so far
    computed: int
    groups: tuple[GroupHolding, ...]
    slots: int = 0  # tokens that fit in every group
    _next_change: int = 0  # computed length at which a block changes its state

    def __post_init__(self) -> None:
        """Enters the books of its session, its executor and its place."""
        self.session.holdings[self.sequence_id] = self
        self.executor.holdings.add(self)
        self._regroup()
        for group in self.groups:
            for key in group.known_keys[len(group.keys) :]:
                self.place.filling.setdefault(key, self)

    def advance(self, computed: int, token_ids: Sequence[int]) -> list[Sealed] | None:
        """Takes in computed length and new output tokens; returns the blocks that became full and keyed.

        None where no block changed its state.

        After new output exactly the last token is still without KV: anything else is a repeated or lost message.
        """
        known = len(self.tokens) + len(token_ids)
        if computed < self.computed:
            raise Refused(f"computed length runs back from {self.computed} to {computed}")
        if computed > known or (token_ids and computed != known - 1):
            raise Refused(f"computed length {computed} does not go with {known} known tokens")
        if computed > self.slots:
            raise Refused(f"computed length {computed} is beyond the {self.slots} slots held")
        if token_ids:
            if min(token_ids) < 0:
                raise Refused("negative token id")
            self.tokens.extend(token_ids)
        self.computed = computed
        return self._settle() if computed >= self._next_change else None

    def grow(self, counts: Sequence[int], copies: Sequence[CopyPlan | None]) -> list[list[Demotion]]:
        """Appends so many fresh blocks to each group, and what that takes of colder pools; the room is checked.

        Returns the new demotions by group.
        """
        demotions = []
        for group, count, plan in zip(self.groups, counts, copies, strict=True):
            namespace = group.key_space.namespace
            group.blocks += group.pool.acquire((), count, namespace)
            demotions.append(plan.take(namespace) if plan is not None else [])
            group.pending += demotions[-1]
        self._regroup()
        return demotions

    def release(self) -> None:
        """Gives all blocks back."""
        for group in self.groups:
            self._filled(group.known_keys[len(group.keys) :])
            group.release()

    def send_down(self) -> None:
        """Begins to copy what it computed to a lower tier, where there is one: it was released, and comes back soon."""
        if self.executor.uses_lower_tiers and not self.executor.has_ended(self.epoch):
            for group in self.groups:
                self.executor.moves.send_down(group.pool, group.blocks[: len(group.keys)], self.epoch)

    def _settle(self) -> list[Sealed]:
        sealed: list[Sealed] = []
        for group in self.groups:
            first = len(group.keys)
            sealed += group.settle(self.tokens, self.computed)
            self._filled(group.known_keys[first : len(group.keys)])
        self._regroup()
        return sealed

    def _filled(self, keys: Sequence[bytes]) -> None:
        """These blocks are not being computed by this sequence any more."""
        for key in keys:
            if self.place.filling.get(key) is self:
                del self.place.filling[key]

    def _regroup(self) -> None:
        """Brings what follows from the groups in line with them."""
        computed, slots, next_change = self.computed, MOST_TOKENS, MOST_TOKENS
        for group in self.groups:
            size = group.pool.spec.block_size
            slots = min(slots, len(group.blocks) * size)
            next_change = min(next_change, computed + size - computed % size if computed % size else computed + 1)
            if group.pending:
                next_change = min(next_change, group.pending[0].length + 1)
        self.slots, self._next_change = slots, next_change


@dataclass(slots=True, eq=False)
class Session:
    """One stream of a scheduler, and what was reserved on it."""

    scheduler_id: str
    holdings: dict[int, Holding] = field(default_factory=dict)  # by sequence
    lease_end: float = math.inf  # seconds on the caller's clock; infinite while the stream lasts
    absent: dict[int, Restated] = field(default_factory=dict)  # restated; their executors are not connected yet

    @property
    def is_open(self) -> bool:
        return self.lease_end == math.inf
