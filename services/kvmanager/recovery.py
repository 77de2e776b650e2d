"""What a scheduler holds from before, held again: after a restart of the kvmanager, or on a new stream."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from services.kvmanager.blocks import BlockState
from services.kvmanager.copies import Demotion
from services.kvmanager.executors import Executor, Place
from services.kvmanager.holdings import GroupHolding, Holding, Refused, Sealed, Session
from services.kvmanager.keys import ROOT, KeySpace, block_keys, pack
from services.kvmanager.pools import Pool
from services.kvmanager.reservations import ExtensionAnswer, GroupBlocks, Restated


class Rebuilt(NamedTuple):
    """What became of a restated sequence: blocks whose content became known by it, or why it is lost."""

    session: Session
    sequence_id: int
    executor_id: str
    sealed: list[Sealed]
    slots: int = 0  # asked for meanwhile; 0 for none
    extension: ExtensionAnswer | None = None  # what came of that
    problem: str = ""


def rebuild(session: Session, executor: Executor, restated: Restated) -> list[Sealed]:
    """Holds a sequence's very blocks again. Returns those whose content became known by it.

    Raises Refused, having changed nothing, where a block is not what the scheduler takes it for.
    """
    problem = restated.problem()
    if problem:
        raise Refused(problem)
    if not executor.runs(restated.key_space, restated.epoch):
        raise Refused("its executor has another epoch, model or policy now")
    place = _place(executor, restated.blocks)
    tables = [_read(ages, restated) for ages in place.groups]
    claims = _Claims(executor)
    for table in tables:
        table.check(claims)
    claims.take(restated.key_space.namespace)
    groups = tuple(table.hold() for table in tables)
    Holding(restated.sequence_id, session, executor, place, restated.epoch, restated.tokens, restated.computed, groups)
    sealed = claims.settle()
    for group in groups:
        full, part = divmod(restated.computed, group.pool.spec.block_size)
        if part:
            group.pool.blocks.advance(group.blocks[full], BlockState.PENDING)
    return sealed


@dataclass(slots=True)
class _Claims:
    """Blocks to hold: those that are known to hold their content, and those that nobody holds."""

    executor: Executor
    held: list[tuple[Pool, int]] = field(default_factory=list)
    free: dict[tuple[Pool, int], bytes | None] = field(default_factory=dict)  # and the key of what is in them
    named: set[tuple[Pool, int]] = field(default_factory=set)

    def want(self, pool: Pool, block: int, position: int, key: bytes | None) -> None:
        """A block with this content, or (None) one that is not full."""
        name = f"block {block} of pool {pool.spec.pool_id}"
        if (pool, block) in self.named:
            raise Refused(f"{name} is named twice")
        self.named.add((pool, block))
        if key is not None and (pool.index.find(key) == block or self._is_shared(pool, block, position, key)):
            self.held.append((pool, block))
        elif pool.blocks.state(block) == BlockState.FREE or (pool.blocks.is_idle(block) and key is None):
            self.free[pool, block] = key
        elif pool.blocks.is_idle(block):
            raise Refused(f"{name} has other content")
        else:
            raise Refused(f"{name} is held by another")

    def _is_shared(self, pool: Pool, block: int, position: int, key: bytes) -> bool:
        """Whether another sequence holds it for the same content, though another block is found by that key."""
        groups = (group for holding in self.executor.holdings for group in holding.groups)
        return any(group.reads(pool, block, position, key) for group in groups)

    def take(self, namespace: str) -> None:
        for pool, block in self.held:
            pool.acquire([block], 0, namespace)
        by_pool: dict[Pool, list[int]] = {}
        for pool, block in self.free:
            pool.discard(block)  # what is remembered of it is older than this sequence
            by_pool.setdefault(pool, []).append(block)
        for pool, blocks in by_pool.items():
            pool.claim(blocks, namespace)

    def settle(self) -> list[Sealed]:
        return [
            Sealed(pool.spec.group_id, pool.spec.first_block_id + block, key)
            for (pool, block), key in self.free.items()
            if key is not None and pool.settle(block, key)
        ]


@dataclass(slots=True)
class _Table:
    """A sequence's blocks in one cache group, read from what was restated."""

    ages: tuple[Pool, ...]
    key_space: KeySpace
    keys: list[bytes]  # of all full blocks of the tokens, computed or not
    full: int  # blocks wholly computed
    blocks: list[int] = field(default_factory=list)
    demoted: dict[int, int] = field(default_factory=dict)
    pending: list[Demotion] = field(default_factory=list)
    in_the_end: dict[int, int] = field(default_factory=dict)  # as `demoted`, once all changes are made

    def begin(self, position: int, block_id: int) -> None:
        """The next block as it was granted: colder ones are those of a cached prefix."""
        age, block = self._read(position, block_id, self.full)
        self.blocks.append(block)
        if age:
            self.demoted[position] = self.in_the_end[position] = age

    def change(self, length: int, position: int, block_id: int, writes: bool, *, is_made: bool) -> None:
        """What follows, in order. `is_made`: all of it is behind the sequence."""
        age, block = self._read(position, block_id, length // self.ages[0].spec.block_size)
        if position >= len(self.blocks) or age <= self.in_the_end.get(position, 0):
            raise Refused(f"position {position} does not become colder with block {block_id}")
        self.in_the_end[position] = age
        if is_made:
            self.blocks[position], self.demoted[position] = block, age
        else:
            self.pending.append(Demotion(length, position, age, block, writes))

    def _read(self, position: int, block_id: int, full: int) -> tuple[int, int]:
        found = _find(self.ages, block_id)
        if found is None or (found[0] and not 0 < position < full):
            raise Refused(f"block {block_id} cannot be at position {position}, where {full} are full")
        return found

    def check(self, claims: _Claims) -> None:
        for position, block in enumerate(self.blocks):
            key = self.keys[position] if position < self.full else None
            claims.want(self.ages[self.demoted.get(position, 0)], block, position, key)
        for demotion in self.pending:
            key = self.keys[demotion.position] if demotion.position < len(self.keys) else None
            if not demotion.writes and key is None:
                raise Refused("a copy that is ready is of tokens that are not known")
            claims.want(self.ages[demotion.age], demotion.block, demotion.position, None if demotion.writes else key)

    def hold(self) -> GroupHolding:
        return GroupHolding(
            self.ages,
            self.blocks,
            self.keys[: self.full],
            self.keys,
            self.key_space,
            demoted=self.demoted,
            pending=deque(self.pending),
        )


def _place(executor: Executor, blocks: Sequence[GroupBlocks]) -> Place:
    """Where all of these blocks lie."""
    by_group = {group.group_id: group.block_ids for group in blocks}
    for place in executor.places:
        if by_group.keys() == {pool.spec.group_id for pool in place.pools} and all(
            _find(ages, block_id) is not None for ages in place.groups for block_id in by_group[ages[0].spec.group_id]
        ):
            return place
    raise Refused("its blocks do not lie in the pools of one place")


def _read(ages: tuple[Pool, ...], restated: Restated) -> _Table:
    spec, tokens, computed = ages[0].spec, restated.tokens, restated.computed
    prefix = restated.key_space.prefix(spec.group_id)
    keys = block_keys(prefix, ROOT, pack(tokens, 0, max(computed, len(tokens) - 1)), spec.block_size)
    table = _Table(ages, restated.key_space, keys, computed // spec.block_size)
    (granted,) = [group for group in restated.blocks if group.group_id == spec.group_id]
    if len(granted.block_ids) * spec.block_size < computed:
        raise Refused(f"{len(granted.block_ids)} blocks do not hold {computed} tokens")
    for position, block_id in enumerate(granted.block_ids):
        table.begin(position, block_id)
    for change in restated.demotions:
        if change.group_id == spec.group_id:
            for position, block_id, writes in zip(change.positions, change.block_ids, change.writes, strict=True):
                table.change(change.length, position, block_id, writes, is_made=change.length < computed)
    return table


def _find(ages: Sequence[Pool], block_id: int) -> tuple[int, int] | None:
    """Age and block of an id."""
    for age, pool in enumerate(ages):
        block = pool.index_of(block_id)
        if block is not None:
            return age, block
    return None
