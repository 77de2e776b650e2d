"""The integrity check: every block is where the books say, and every reference has a holder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from services.kvmanager.blocks import BlockState
from services.kvmanager.executors import Executor
from services.kvmanager.holdings import GroupHolding, Holding, Session
from services.kvmanager.pools import Pool


def find_violations(executors: Mapping[str, Executor], sessions: Iterable[Session]) -> list[str]:
    """What is wrong, for people; empty when sound. Reads everything, changes nothing."""
    problems = []
    held_by_sessions = {id(holding) for session in sessions for holding in session.holdings.values()}
    held_on_executors = {id(holding) for executor in executors.values() for holding in executor.holdings}
    if held_by_sessions != held_on_executors:
        problems.append("sessions and executors name different sequences")
    for executor in executors.values():
        groups: dict[int, list[GroupHolding]] = {id(pool): [] for pool in executor.pools}
        for holding in executor.holdings:
            problems += [f"sequence {holding.sequence_id}: {problem}" for problem in _check_holding(holding)]
            for group in holding.groups:
                groups[id(group.pool)].append(group)
        for pool in executor.pools:
            name = f"{executor.spec.executor_id} pool {pool.spec.pool_id}"
            problems += [f"{name}: {problem}" for problem in _check_pool(pool, groups[id(pool)])]
    return problems


def _check_pool(pool: Pool, holders: Iterable[GroupHolding]) -> Iterable[str]:
    blocks = pool.blocks
    references = np.frombuffer(blocks.reference_counts(), dtype=np.int32)
    held = [np.asarray(group.blocks, dtype=np.int64) for group in holders]
    expected = np.bincount(np.concatenate([np.empty(0, np.int64), *held]), minlength=blocks.count)
    for block in np.flatnonzero(references != expected).tolist():
        yield f"block {block} counts {references[block]} holders and has {expected[block]}"
    free, cached = blocks.free_order(), blocks.eviction_order()
    leased = np.flatnonzero(references).tolist()
    if sorted([*free, *cached, *leased]) != list(range(blocks.count)):
        yield f"free {len(free)} + cached {len(cached)} + leased {len(leased)} are not the {blocks.count} blocks"
    if (blocks.free_count, blocks.cached_count, blocks.leased_count) != (len(free), len(cached), len(leased)):
        yield "a count differs from what it counts"
    for block in free:
        if blocks.state(block) != BlockState.FREE or blocks.is_keyed(block):
            yield f"free block {block} has content"
    keyed = 0
    for key, block in pool.index.items():
        keyed += 1
        if pool.index.key_of(block) != key or not blocks.is_keyed(block):
            yield f"block {block} does not know its key"
        if blocks.state(block) != BlockState.READY:
            yield f"block {block} can be found and is {blocks.state(block).name}"
    if keyed != sum(blocks.is_keyed(block) for block in range(blocks.count)):
        yield "a keyed block cannot be found"
    if not all(map(blocks.is_keyed, cached)):
        yield "a cached block has no key"


def _check_holding(holding: Holding) -> Iterable[str]:
    for group in holding.groups:
        size, state = group.pool.spec.block_size, group.pool.blocks.state
        full, part = divmod(holding.computed, size)
        if len(group.keys) != full:
            yield f"{len(group.keys)} keys for {full} full blocks"
        for position, block in enumerate(group.blocks):
            expected = (
                BlockState.READY
                if position < full
                else BlockState.PENDING
                if position == full and part
                else BlockState.RESERVED
            )
            if state(block) != expected:
                yield f"block {block} at {position} is {state(block).name}, not {expected.name}"
