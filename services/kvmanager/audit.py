"""The integrity check: every block is where the books say, and every reference has a holder."""

from __future__ import annotations

import itertools
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
        held: dict[int, list[int]] = {id(pool): [] for pool in executor.pools}
        for holding in executor.holdings:
            for group in holding.groups:
                for demotion in group.pending:
                    held[id(group.ages[demotion.age])].append(demotion.block)
                found = _check_group(holding, group, books, held)
                problems += [f"sequence {holding.sequence_id}: {problem}" for problem in found]
        for move in executor.moves:
            for spot in move.spots:
                held[id(spot.pool)].append(spot.block)
        for pool in executor.pools:
            name = f"{executor.spec.executor_id} pool {pool.spec.pool_id}"
            found = _check_pool(pool, books[id(pool)], held[id(pool)])
            problems += [f"{name}: {problem}" for problem in found]
        for place in executor.places:
            problems += [
                f"{executor.spec.executor_id}: a block is said to be computed by sequence {holding.sequence_id}"
                for holding in place.filling.values()
                if holding not in executor.holdings
            ]
    return problems


def _read(pool: Pool) -> Books:
    references, states, keyed = pool.blocks.snapshot()
    return Books(
        np.frombuffer(references, np.int32), np.frombuffer(states, np.uint8), np.frombuffer(keyed, np.uint8) != 0
    )


def _check_pool(pool: Pool, books: Books, held: Sequence[int]) -> Iterable[str]:
    blocks, count = pool.blocks, pool.blocks.count
    expected = np.bincount(np.asarray(held, np.int64), minlength=count)
    for block in np.flatnonzero(books.references != expected).tolist():
        yield f"block {block} counts {books.references[block]} holders and has {expected[block]}"
    free, cached = (np.asarray(order, np.int64) for order in (blocks.free_order(), blocks.eviction_order()))
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


def _check_group(
    holding: Holding, group: GroupHolding, books: Mapping[int, Books], held: Mapping[int, list[int]]
) -> Iterable[str]:
    """Keys and states follow the computed length: ready below it, pending where it ends, reserved above.

    Notes in `held` which blocks the group's table names.
    """
    full, part = divmod(holding.computed, group.pool.spec.block_size)
    if len(group.keys) != full:
        yield f"{len(group.keys)} keys for {full} full blocks"
    if not group.demoted:
        held[id(group.pool)].extend(group.blocks)
        states = books[id(group.pool)].states[np.asarray(group.blocks, np.int64)]
    else:
        pools = [group.ages[group.demoted.get(position, 0)] for position in range(len(group.blocks))]
        for pool, block in zip(pools, group.blocks, strict=True):
            held[id(pool)].append(block)
        found = [books[id(pool)].states[block] for pool, block in zip(pools, group.blocks, strict=True)]
        states = np.array(found, np.uint8)
    expected = np.full(len(group.blocks), RESERVED, np.uint8)
    expected[:full] = READY
    expected[full : full + bool(part)] = PENDING
    for position in np.flatnonzero(states != expected).tolist():
        names = BlockState(states[position]).name, BlockState(expected[position]).name
        yield f"block {group.blocks[position]} at {position} is {names[0]}, not {names[1]}"
    if any(later.length < earlier.length for earlier, later in itertools.pairwise(group.pending)):
        yield "demotions are out of order"
