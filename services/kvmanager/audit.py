"""The integrity check: every block is where the books say, and every reference has a holder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from services.kvmanager.blocks import BlockState
from services.kvmanager.executors import Executor
from services.kvmanager.holdings import GroupHolding, Holding, Session
from services.kvmanager.pools import Pool

RESERVED, PENDING, READY = BlockState.RESERVED, BlockState.PENDING, BlockState.READY


class Books(NamedTuple):
    """A pool's arrays, by block."""

    references: NDArray[np.int32]
    states: NDArray[np.uint8]
    keyed: NDArray[np.bool_]


def find_violations(executors: Mapping[str, Executor], sessions: Iterable[Session]) -> list[str]:
    """What is wrong, for people; empty when sound. Reads everything, changes nothing."""
    problems = []
    held_by_sessions = {id(holding) for session in sessions for holding in session.holdings.values()}
    held_on_executors = {id(holding) for executor in executors.values() for holding in executor.holdings}
    if held_by_sessions != held_on_executors:
        problems.append("sessions and executors name different sequences")
    for executor in executors.values():
        books = {id(pool): _read(pool) for pool in executor.pools}
        holders: dict[int, list[GroupHolding]] = {id(pool): [] for pool in executor.pools}
        for holding in executor.holdings:
            for group in holding.groups:
                holders[id(group.pool)].append(group)
                found = _check_group(holding, group, books[id(group.pool)])
                problems += [f"sequence {holding.sequence_id}: {problem}" for problem in found]
        for pool in executor.pools:
            name = f"{executor.spec.executor_id} pool {pool.spec.pool_id}"
            found = _check_pool(pool, books[id(pool)], holders[id(pool)])
            problems += [f"{name}: {problem}" for problem in found]
    return problems


def _read(pool: Pool) -> Books:
    references, states, keyed = pool.blocks.snapshot()
    return Books(
        np.frombuffer(references, np.int32), np.frombuffer(states, np.uint8), np.frombuffer(keyed, np.uint8) != 0
    )


def _check_pool(pool: Pool, books: Books, holders: Sequence[GroupHolding]) -> Iterable[str]:
    blocks, count = pool.blocks, pool.blocks.count
    held = _joined([group.blocks for group in holders])
    expected = np.bincount(held, minlength=count)
    for block in np.flatnonzero(books.references != expected).tolist():
        yield f"block {block} counts {books.references[block]} holders and has {expected[block]}"
    free, cached = _joined([blocks.free_order()]), _joined([blocks.eviction_order()])
    leased = np.flatnonzero(books.references)
    if not np.array_equal(np.sort(np.concatenate([free, cached, leased])), np.arange(count)):
        yield f"free {len(free)} + cached {len(cached)} + leased {len(leased)} are not the {count} blocks"
    if (blocks.free_count, blocks.cached_count, blocks.leased_count) != (len(free), len(cached), len(leased)):
        yield "a count differs from what it counts"
    if books.states[free].any() or books.keyed[free].any():
        yield "a free block has content"
    if not books.keyed[cached].all():
        yield "a cached block has no key"
    indexed = np.fromiter((block for _, block in pool.index.items()), np.int64, len(pool.index))
    if pool.index.one_sided() or not books.keyed[indexed].all():
        yield "a block does not know its key"
    if len(indexed) != books.keyed.sum():
        yield "a keyed block cannot be found"
    for block in indexed[books.states[indexed] != READY].tolist():
        yield f"block {block} can be found and is {BlockState(books.states[block]).name}"


def _check_group(holding: Holding, group: GroupHolding, books: Books) -> Iterable[str]:
    """Keys and states follow the computed length: ready below it, pending where it ends, reserved above."""
    full, part = divmod(holding.computed, group.pool.spec.block_size)
    if len(group.keys) != full:
        yield f"{len(group.keys)} keys for {full} full blocks"
    expected = np.full(len(group.blocks), RESERVED, np.uint8)
    expected[:full] = READY
    expected[full : full + bool(part)] = PENDING
    states = books.states[_joined([group.blocks])]
    for position in np.flatnonzero(states != expected).tolist():
        names = BlockState(states[position]).name, BlockState(expected[position]).name
        yield f"block {group.blocks[position]} at {position} is {names[0]}, not {names[1]}"


def _joined(lists: Iterable[Sequence[int]]) -> NDArray[np.int64]:
    return np.concatenate([np.empty(0, np.int64), *(np.asarray(blocks, np.int64) for blocks in lists)])
