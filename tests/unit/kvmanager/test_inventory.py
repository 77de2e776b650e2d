"""What an executor states of its blocks is older than what happens while it is under way."""

from __future__ import annotations

from services.kvmanager.executors import InventoryBlock
from services.kvmanager.manager import KvManager
from services.kvmanager.placement import Outcome
from services.kvmanager.reservations import AllowedExecutor
from tests.unit.kvmanager.helpers import compute, eviction_order, executor, manager, reservation
from tests.unit.kvmanager.test_recovery import restated

PROMPT = range(50, 59)


def stated() -> list[InventoryBlock]:
    """Blocks 0 and 1 with the prompt's first eight tokens, as an executor would state them."""
    made, session = manager()
    made.reserve(session, reservation(1, PROMPT[:8]))
    return compute(made, session, 1)


def test_nothing_is_placed_on_an_executor_before_it_states_its_inventory() -> None:
    made = KvManager(10.0)
    session = made.open_session("s", 0.0)
    entered = made.enter(executor(), epoch=1)
    assert made.reserve(session, reservation(1, PROMPT)).outcome == Outcome.NO_EXECUTOR
    entered.settle([])
    assert made.reserve(session, reservation(1, PROMPT)).outcome == Outcome.GRANTED


def test_an_inventory_says_nothing_of_blocks_handed_out_since_it_was_asked_for() -> None:
    """After a restart of the manager, a sequence that goes on takes a block, writes it and ends meanwhile."""
    first, second = stated()
    made = KvManager(10.0)
    session = made.open_session("s", 0.0)
    entered = made.enter(executor(), epoch=1)
    made.restate(session, restated(tokens=10, computed=10))
    assert made.extend(session, 1, 16).blocks == [(0, [first.block_id])]
    made.release(session, 1)
    entered.settle([first, second])
    assert first.block_id not in eviction_order(made)
    assert second.block_id in eviction_order(made)
    assert made.reserve(session, reservation(2, PROMPT)).cached_tokens == 0
    assert made.verify() == []


def test_an_executor_that_left_while_it_was_asked_does_not_lose_what_was_handed_out() -> None:
    first, second = stated()
    made = KvManager(10.0)
    session = made.open_session("s", 0.0)
    made.enter(executor(), epoch=1)
    made.restate(session, restated(tokens=10, computed=10))
    assert made.extend(session, 1, 16).blocks == [(0, [first.block_id])]
    made.unregister("e")
    again = made.enter(executor(), epoch=1)
    made.release(session, 1)
    again.settle([first, second])
    assert first.block_id not in eviction_order(made)
    assert made.verify() == []


def test_a_scheduler_from_before_makes_an_inventory_too_old() -> None:
    """What it wrote before it came back, and holds no longer, the inventory may not tell."""
    first, second = stated()
    made = KvManager(10.0)
    entered, _ = made.register(executor(), [first, second], epoch=1)
    session = made.open_session("s", 0.0)
    made.all_restated(session)
    assert made.reserve(session, reservation(1, PROMPT)).outcome == Outcome.NO_EXECUTOR
    entered.settle([first])
    assert made.reserve(session, reservation(1, PROMPT)).cached_tokens == 4
    made.end_session(session, 0.0)
    again = made.open_session("s", 0.0)
    made.all_restated(again)  # of this one all is known
    assert made.reserve(again, reservation(2, PROMPT)).outcome == Outcome.GRANTED
    assert made.verify() == []


def test_a_new_scheduler_leaves_executors_as_they_are() -> None:
    made = KvManager(10.0)
    made.register(executor(), stated(), epoch=1)
    session = made.open_session("s", 0.0)
    assert made.reserve(session, reservation(1, PROMPT)).cached_tokens == 8


def test_a_new_epoch_makes_an_inventory_too_old() -> None:
    """Sequences of the epoch before were computed until then, whoever had granted their blocks."""
    first, second = stated()
    made = KvManager(10.0)
    entered, _ = made.register(executor(), [first, second], epoch=1)
    session = made.open_session("s", 0.0)
    newer = reservation(1, PROMPT, on=[AllowedExecutor("e", 2)])
    assert made.reserve(session, newer).outcome == Outcome.NO_EXECUTOR  # its scheduler knows of it first
    made.report("e", 2, [1])
    assert made.reserve(session, newer).outcome == Outcome.NO_EXECUTOR
    entered.settle([first])
    assert made.reserve(session, newer).cached_tokens == 4
    assert made.verify() == []


def test_of_a_restated_sequence_content_that_the_executor_denies_is_forgotten() -> None:
    other = stated()[0]
    made = KvManager(10.0)
    session = made.open_session("s", 0.0)
    entered = made.enter(executor(), epoch=1)
    made.restate(session, restated(tokens=10, computed=10))
    entered.settle([other._replace(block_id=3)])
    made.release(session, 1)
    assert 3 not in eviction_order(made)
    assert 4 in eviction_order(made)
    assert made.verify() == []
