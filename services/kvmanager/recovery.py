"""What a scheduler holds from before, held again: after a restart of the kvmanager, or on a new stream."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from services.kvmanager.blocks import BlockState
from services.kvmanager.copies import Demotion
from services.kvmanager.executors import Executor, Place
from services.kvmanager.holdings import GroupHolding, Holding, Refused, Sealed, Session
from services.kvmanager.keys import ROOT, KeySpace, block_keys, pack
from services.kvmanager.pools import Pool
from services.kvmanager.reservations import GroupBlocks, Restated


def rebuild(session: Session, executor: Executor, restated: Restated) -> list[Sealed]:
    """Holds a sequence's very blocks again. Returns those whose content became known by it.

    Raises Refused, having changed nothing, where a block is not what the scheduler takes it for.
    """
    problem = restated.problem()
    if problem:
        raise Refused(problem)
    if not executor.takes(restated.key_space, restated.epoch):
        raise Refused("its executor has another epoch, model or policy now")
    place = _place(executor, restated.blocks)
    tables = [_read(ages, restated) for ages in place.groups]
    claims = _Claims()
    for table in tables:
        table.check(claims)
    claims.take(restated.key_space.namespace)
    groups = tuple(table.hold() for table in tables)
    holding = Holding(
        restated.sequence_id, session, executor, place, restated.epoch, restated.tokens, restated.computed, groups
    )
    session.holdings[restated.sequence_id] = holding
    executor.holdings.add(holding)
    sealed = claims.settle()
    for group in groups:
        full, part = divmod(restated.computed, group.pool.spec.block_size)
        if part:
            group.pool.blocks.advance(group.blocks[full], BlockState.PENDING)
    return sealed


@dataclass(slots=True)
class _Claims:
    """Blocks to hold: those that hold their content already, and those that must be free."""

    held: list[tuple[Pool, int]] = field(default_factory=list)
    free: dict[tuple[Pool, int], bytes | None] = field(default_factory=dict)  # and the content that is in them

    def want(self, pool: Pool, block: int, key: bytes | None) -> None:
        """`key`: of what the block holds, None where it is not full."""
        if not 0 <= block < pool.spec.block_count:
            raise Refused(f"block {block} is not one of pool {pool.spec.pool_id}")
        if key is not None and pool.index.find(key) == block:
            self.held.append((pool, block))
        elif (pool, block) in self.free or not (
            pool.blocks.is_idle(block) or pool.blocks.state(block) == BlockState.FREE
        ):
            raise Refused(f"block {block} of pool {pool.spec.pool_id} is held by another sequence")
        else:
            self.free[pool, block] = key

    def take(self, namespace: str) -> None:
        for pool, block in self.held:
            pool.acquire([block], 0, namespace)
        by_pool: dict[Pool, list[int]] = {}
        for pool, block in self.free:
            pool.discard(block)  # what the executor remembers of it is older than this sequence
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
    blocks: list[int]
    demoted: dict[int, int]
    pending: list[Demotion]

    def check(self, claims: _Claims) -> None:
        for position, block in enumerate(self.blocks):
            key = self.keys[position] if position < self.full else None
            claims.want(self.ages[self.demoted.get(position, 0)], block, key)
        for demotion in self.pending:
            key = self.keys[demotion.position] if demotion.position < len(self.keys) else None
            if not demotion.writes and key is None:
                raise Refused("a copy that is ready is of tokens that are not known")
            claims.want(self.ages[demotion.age], demotion.block, None if demotion.writes else key)

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
    """Where all of these hot blocks lie."""
    by_group = {group.group_id: group.block_ids for group in blocks}
    for place in executor.places:
        if Counter(by_group.keys()) == Counter(pool.spec.group_id for pool in place.pools) and all(
            pool.index_of(block_id) is not None for pool in place.pools for block_id in by_group[pool.spec.group_id]
        ):
            return place
    raise Refused("its blocks do not lie in the hot pools of one place")


def _read(ages: tuple[Pool, ...], restated: Restated) -> _Table:
    spec = ages[0].spec
    (granted,) = [group for group in restated.blocks if group.group_id == spec.group_id]
    prefix = restated.key_space.prefix(spec.group_id)
    tokens = restated.tokens
    keys = block_keys(prefix, ROOT, pack(tokens, 0, max(restated.computed, len(tokens) - 1)), spec.block_size)
    full = restated.computed // spec.block_size
    table = _Table(ages, restated.key_space, keys, full, [i - spec.first_block_id for i in granted.block_ids], {}, [])
    if len(table.blocks) * spec.block_size < restated.computed:
        raise Refused(f"{len(table.blocks)} blocks do not hold {restated.computed} tokens")
    for change in restated.demotions:
        if change.group_id != spec.group_id:
            continue
        for position, block_id, writes in zip(change.positions, change.block_ids, change.writes, strict=True):
            age, block = _find(ages, block_id)
            if not 0 <= position < len(table.blocks) or age <= table.demoted.get(position, 0):
                raise Refused(f"position {position} does not become colder with block {block_id}")
            if change.length < restated.computed:
                table.blocks[position], table.demoted[position] = block, age
            else:
                table.pending.append(Demotion(change.length, position, age, block, writes))
    return table


def _find(ages: Sequence[Pool], block_id: int) -> tuple[int, int]:
    for age, pool in enumerate(ages):
        block = pool.index_of(block_id)
        if block is not None:
            return age, block
    raise Refused(f"block {block_id} is in no pool of its group")
