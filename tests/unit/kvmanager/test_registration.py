"""Executors that come, go, come back and change their model."""

from __future__ import annotations

import pytest

from services.kvmanager.executors import ExecutorSpec, InventoryBlock
from services.kvmanager.holdings import Refused
from services.kvmanager.manager import KvManager
from services.kvmanager.placement import Outcome
from services.kvmanager.reservations import AllowedExecutor
from tests.unit.kvmanager.helpers import (
    MODEL,
    compute,
    eviction_order,
    executor,
    free_order,
    ids,
    manager,
    only_executor,
    pool,
    reservation,
)


def sealed_prompt() -> list[InventoryBlock]:
    """Two blocks of a prompt of eight tokens, as an executor would report them: blocks 0 and 1."""
    made, session = manager()
    made.reserve(session, reservation(1, range(8)))
    return compute(made, session, 1)


def test_inventory_is_restored_as_cached() -> None:
    """F7: a restarted manager finds what was computed before, by keys alone."""
    made = KvManager(10.0)
    session = made.open_session("s", 0.0)
    _, refused = made.register(executor(), sealed_prompt(), epoch=1)
    assert refused == 0
    assert eviction_order(made) == [1, 0]
    assert free_order(made) == [2, 3, 4, 5, 6, 7]
    answer = made.reserve(session, reservation(1, range(9)))
    assert (answer.cached_tokens, ids(answer)) == (8, [0, 1, 2])
    assert made.verify() == []


def test_unusable_inventory_is_left_out_and_counted() -> None:
    first, second = sealed_prompt()
    bad = [
        InventoryBlock(0, 8, bytes(32)),
        InventoryBlock(1, 0, bytes(32)),
        InventoryBlock(0, -1, bytes(32)),
        InventoryBlock(0, 3, bytes(31)),
        InventoryBlock(0, 0, bytes(32)),
        InventoryBlock(0, 4, first.key),
    ]
    made = KvManager(10.0)
    _, refused = made.register(executor(), [first, second, *bad], epoch=1)
    assert refused == len(bad)
    assert eviction_order(made) == [4, 1]
    assert made.verify() == []


def test_a_returning_executor_keeps_its_sequences_and_what_it_confirms() -> None:
    made, session = manager()
    made.reserve(session, reservation(1, range(8)))
    made.reserve(session, reservation(2, range(50, 58)))
    first, second = compute(made, session, 1)
    third, fourth = compute(made, session, 2)
    made.release(session, 1)
    made.unregister("e")
    assert made.reserve(session, reservation(3, range(8))).outcome == Outcome.NO_EXECUTOR
    assert made.extend(session, 2, 12).blocks == [(0, [4])]  # running sequences go on meanwhile
    stale = InventoryBlock(0, 7, bytes(32))
    made.register(executor(), [first, third, stale], epoch=1)
    assert eviction_order(made) == [0]
    assert free_order(made) == [1, 5, 6, 7]
    assert made.reserve(session, reservation(3, range(8))).cached_tokens == 4
    assert made.reserve(session, reservation(4, range(50, 59))).cached_tokens == 4
    assert made.verify() == []
    for sequence in (2, 3, 4):
        made.release(session, sequence)
    assert only_executor(made).available_count == 8
    assert (second.block_id, fourth.block_id) == (1, 3)
    assert sorted(eviction_order(made)) == [0, 2]
    assert made.verify() == []


def test_a_restarted_process_under_the_same_name_begins_anew() -> None:
    """Its epochs start again, so nothing that was held or cached is there any more."""
    made, session = manager(epoch=3)
    made.reserve(session, reservation(1, range(8), on=[AllowedExecutor("e", 3)]))
    compute(made, session, 1)
    made.unregister("e")
    made.register(executor(), [], epoch=0)
    assert only_executor(made).available_count == 8
    assert eviction_order(made) == []
    assert session.holdings == {}
    with pytest.raises(Refused, match="unknown sequence"):
        made.release(session, 1)
    assert made.verify() == []


def test_registering_with_a_newer_epoch_closes_the_older_ones() -> None:
    made, session = manager()
    made.reserve(session, reservation(1, range(8)))
    made.end_session(session, now=0.0)
    made.unregister("e")
    made.register(executor(), [], epoch=2)
    assert made.reclaim(now=100.0) == {"e"}
    assert only_executor(made).available_count == 8


def test_a_model_change_clears_the_blocks_and_the_sequences_there_only() -> None:
    made, session = manager(executor("a"), executor("b"))
    made.reserve(session, reservation(1, range(8), on=["a"]))
    made.reserve(session, reservation(2, range(8), on=["b"]))
    compute(made, session, 1)
    made.replace(executor("a", pool(3, 16), model="b" * 64), epoch=1).settle([])
    assert list(session.holdings) == [2]
    assert made.executors["a"].block_count == 3
    assert made.reserve(session, reservation(3, range(8), on=["a"])).outcome == Outcome.NO_EXECUTOR
    assert made.verify() == []


def test_an_unloaded_executor_takes_nothing() -> None:
    made, session = manager()
    made.replace(ExecutorSpec("e", "", ()), epoch=1).settle([])
    assert (only_executor(made).available_count, only_executor(made).block_count) == (0, 0)
    assert made.reserve(session, reservation(1, [1])).outcome == Outcome.NO_EXECUTOR
    assert made.reserve(session, reservation(1, [1], model=MODEL)).outcome == Outcome.NO_EXECUTOR


def test_evictions_are_counted_beyond_the_life_of_a_pool() -> None:
    made, session = manager()
    made.reserve(session, reservation(1, range(32)))
    compute(made, session, 1)
    made.release(session, 1)
    made.reserve(session, reservation(2, range(50, 62)))
    assert made.evicted_count == 3
    made.release(session, 2)
    made.unregister("e")
    assert made.executors == {}
    assert made.evicted_count == 3


def test_unregistering_an_unknown_executor_does_nothing() -> None:
    made, _ = manager()
    made.unregister("other")
    assert list(made.executors) == ["e"]
