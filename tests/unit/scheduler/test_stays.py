"""Slots that come in pieces, tables that change with age, and what is stated again on a new stream."""

from __future__ import annotations

import pytest

from quire.v1 import executor_pb2, kvmanager_pb2
from services.common.limits import MESSAGE_TOKENS
from services.scheduler.policy import static_batches
from services.scheduler.preempt import is_stuck
from services.scheduler.reserve import take
from services.scheduler.restate import restate
from services.scheduler.state import Executor, Limits
from services.scheduler.stays import Stay
from tests.unit.scheduler.real_kv import RealKv
from tests.unit.scheduler.sim import Harness, assert_correct, submit
from tests.unit.scheduler.sim_executor import describe
from tests.unit.scheduler.test_batcher import answer, made, place
from tests.unit.scheduler.test_random_load import assert_idle

POLICY = "hot:128,int8:256,int4"


def aged(hot: int = 40, warm: int = 30, cold: int = 30, **fields: int) -> tuple[Harness, Executor]:
    description = describe(
        blocks=hot,
        block_size=32,
        kv_policy=POLICY,
        colder_blocks=(warm, cold),
        **{"max_step_tokens": 200, **fields},  # type: ignore[arg-type]
    )
    harness = Harness(description, limits=Limits(lookahead_tokens=32), kv=RealKv())
    return harness, harness.state.executors[0]


def limits(plans: list[executor_pb2.StepPlan], stay: int) -> list[int]:
    """Token limits granted to a sequence, in order."""
    return [
        limit
        for plan in plans
        for sequence_id, limit in zip(plan.sequence_ids, plan.token_limits, strict=True)
        if sequence_id == stay
    ]


def noted(harness: Harness) -> list[executor_pb2.StepPlan]:
    """All plans that the executor takes from now on."""
    plans: list[executor_pb2.StepPlan] = []
    take_plan = harness.sims[0].take

    def note(plan: executor_pb2.StepPlan) -> None:
        plans.append(plan)
        take_plan(plan)

    harness.sims[0].take = note  # type: ignore[method-assign]
    return plans


def demotion(stay: int, length: int) -> executor_pb2.BlockDemotion:
    return executor_pb2.BlockDemotion(sequence_id=stay, at_length=length, positions=[1], block_ids=[100], writes=[True])


def test_room_ends_at_the_next_change_and_never_at_the_present_length() -> None:
    stay = Stay(1, "e0", 1, "f", "default", POLICY)
    assert stay.room(0) is None
    stay.add([], [demotion(1, 256), demotion(1, 256), demotion(1, 384)])
    assert [stay.room(length) for length in (0, 100, 255)] == [256, 156, 1]
    assert [stay.room(length) for length in (256, 300, 383)] == [128, 84, 1]
    assert stay.room(384) is None
    stay.add([], [demotion(1, 512)])
    assert stay.room(384) == 128


def test_changes_ahead_are_those_that_growth_makes() -> None:
    stay = Stay(1, "e0", 1, "f", "default", POLICY)
    stay.add([], [demotion(1, 256)])
    assert [stay.changes_between(*span) for span in ((0, 256), (0, 257), (256, 257), (257, 400))] == [
        False,
        True,
        True,
        False,
    ]


def test_chunks_stop_at_changes_and_slots_come_in_pieces() -> None:
    harness, _ = aged()
    harness.send(submit(1, [5] * 600, 4))
    place(harness)
    assert limits(list(harness.plans[0]), 1) == [200, 56]  # 256 slots at first, and a change at their end
    harness.settle()
    assert_correct(harness, 1)
    assert_idle(harness)


def test_no_chunk_crosses_a_change_whatever_the_budget() -> None:
    harness, executor = aged(max_step_tokens=1000)
    plans = noted(harness)
    harness.send(submit(1, [5] * 600, 4))
    harness.settle()
    assert limits(plans, 1)[:4] == [256, 128, 128, 88]
    assert not executor.running
    assert_correct(harness, 1)


def test_changes_travel_once_with_the_slots_or_with_the_sequence_that_enters() -> None:
    harness, executor = aged()
    harness.send(submit(1, [5] * 600, 4))
    place(harness)
    first = harness.plans[0][0]
    assert [state.sequence_id for state in first.enter] == [1]
    assert [change.at_length for change in first.demotions] == [256]
    harness.settle()
    assert_correct(harness, 1)
    assert not executor.demotions


def test_every_change_is_sent_exactly_once() -> None:
    harness, executor = aged()
    harness.send(submit(1, [5] * 600, 40, ignore_eos=True))
    plans = noted(harness)
    harness.settle()
    changes = [change for plan in plans for change in plan.demotions]
    sent = [(c.at_length, *one) for c in changes for one in zip(c.positions, c.block_ids, strict=True)]
    assert len(sent) == len(set(sent)) > 20
    assert {length for length, *_ in sent} == {256, 384, 512, 640}
    assert not executor.running


def test_changes_of_a_sequence_that_left_are_not_sent() -> None:
    harness, executor = aged()
    harness.send(submit(1, [5] * 600, 4))
    place(harness)
    executor.demotions = [demotion(1, 384), demotion(9, 384)]
    harness.cancel(1)
    assert [d.sequence_id for plan in list(harness.plans[0])[-1:] for d in plan.demotions] == [9]


def test_blocks_that_come_free_by_growth_are_waited_for_before_anyone_yields() -> None:
    harness, executor = aged()
    harness.send(submit(1, [5] * 600, 4), submit(2, [6] * 100, 4))
    place(harness)
    sequence = executor.running[1]
    sequence.projected_length = sequence.slots_held = 288  # granted, and a change on the way at 256
    executor.starved[1] = sequence
    assert not is_stuck(executor, harness.now)
    sequence.computed_length = 257
    assert is_stuck(executor, harness.now)


def test_an_extension_that_can_never_fit_is_asked_for_in_smaller_pieces() -> None:
    harness, executor = made()
    harness.send(submit(1, [5] * 10, 100))
    place(harness)
    sequence = executor.running[1]
    refusal = kvmanager_pb2.ExtendResult(sequence_id=1, outcome=kvmanager_pb2.RESERVATION_OUTCOME_NEVER_FITS)
    wanted = []
    sequence.slots_asked = sequence.slots_held + 64
    while 1 in executor.running:
        take(harness.state, kvmanager_pb2.ReserveResponse(extensions=[refusal]), 0.0)
        wanted.append(sequence.slots_asked - sequence.slots_held)
        assert len(wanted) < 20
    assert wanted[:4] == [32, 16, 8, 4]
    assert harness.gateway.outbox.ended[0].error.reason == "NEVER_FITS"


def test_operations_of_an_older_epoch_are_dropped() -> None:
    harness, executor = made()
    operation = executor_pb2.BlockOperation(operation_id=1, kind=executor_pb2.BLOCK_OPERATION_KIND_OFFLOAD)

    def told(epoch: int) -> None:
        operations = kvmanager_pb2.ExecutorOperations(executor_id="e0", epoch=epoch, operations=[operation])
        take(harness.state, kvmanager_pb2.ReserveResponse(operations=[operations]), 0.0)

    told(executor.epoch - 1)
    assert not executor.operations
    told(executor.epoch)
    harness.turn()
    assert [list(plan.operations) for plan in harness.plans[0]] == [[operation]]  # a plan of its own, at once


# A new stream


def test_all_that_is_held_is_stated_those_that_leave_too() -> None:
    harness, executor = made()
    harness.send(*(submit(handle, [handle] * 10, 100, ignore_eos=True) for handle in (1, 2, 3)))
    place(harness)
    answer(harness, executor, 1, [7, 8], 11, 2)
    harness.cancel(2)
    assert 2 in executor.leaving
    messages = restate(harness.state)
    stated = {held.sequence_id: held for message in messages for held in message.held}
    assert sorted(stated) == [1, 2, 3]
    assert (list(stated[1].token_ids), stated[1].computed_length) == ([1] * 10 + [7, 8], 11)
    assert (stated[1].executor_id, stated[1].epoch) == ("e0", executor.epoch)
    assert stated[1].model_fingerprint == "f0"
    assert stated[1].namespace == "default"
    assert stated[1].blocks == executor.running[1].stay.block_lists()  # type: ignore[union-attr]
    assert [message.all_held_stated for message in messages] == [False] * (len(messages) - 1) + [True]


def test_one_that_was_placed_but_not_sent_is_stated_with_its_changes() -> None:
    harness, executor = aged()
    harness.send(submit(1, [5] * 600, 4))
    place(harness)
    (message,) = restate(harness.state)
    (held,) = message.held
    assert held.kv_policy == POLICY
    assert [change.at_length for change in held.demotions] == [
        change.at_length
        for change in executor.running[1].stay.demotions  # type: ignore[union-attr]
    ]
    assert held.demotions[0].at_length == 256


def test_statements_are_bounded_and_none_is_left_out() -> None:
    description = describe(blocks=4 * MESSAGE_TOKENS // 64, block_size=64, max_sequences=64)
    description.model.context_length = 4 * MESSAGE_TOKENS
    harness = Harness(description, limits=Limits(lookahead_tokens=1, policy=static_batches()))  # places all at once
    length = MESSAGE_TOKENS // 3
    harness.send(*(submit(handle, [handle] * length, 4) for handle in range(1, 9)))
    place(harness)
    messages = restate(harness.state)
    assert sorted(held.sequence_id for message in messages for held in message.held) == list(range(1, 9))
    assert len(messages) >= 3
    for message in messages:
        assert sum(len(held.token_ids) for held in message.held) <= MESSAGE_TOKENS
    assert [message.all_held_stated for message in messages] == [False] * (len(messages) - 1) + [True]


def test_nothing_held_is_stated_as_such() -> None:
    harness, _ = made()
    (message,) = restate(harness.state)
    assert not message.held
    assert message.all_held_stated


def test_what_was_asked_is_asked_again_under_a_new_id() -> None:
    harness, executor = made()
    harness.send(submit(1, [5] * 10, 4))
    assert list(harness.state.asked) == [1]
    harness.to_kv.clear()
    restate(harness.state)
    assert not harness.state.asked
    assert executor.asked_count == 0
    harness.turn()
    assert list(harness.state.asked) == [2]


def test_lost_sequences_are_computed_anew() -> None:
    harness, executor = made()
    harness.send(submit(1, [5] * 10, 6, ignore_eos=True), submit(2, [6] * 10, 6, ignore_eos=True))
    place(harness)
    answer(harness, executor, 1, [7], 10, 1)
    take(harness.state, kvmanager_pb2.ReserveResponse(lost_sequence_ids=[1, 99]), harness.now)
    assert list(executor.running) == [2]
    assert list(executor.leaving) == [1]  # its blocks are named by plans that are under way
    harness.turn()
    assert list(harness.plans[0][-1].ended_sequence_ids) == [1]
    (again,) = [asked.sequence for asked in harness.state.asked.values()]
    assert again is not None
    assert again.token_ids == [5] * 10 + [7]
    assert not harness.clients[1].done


@pytest.mark.parametrize("loses", [0, 1])
def test_answers_are_the_same_across_a_restart_in_which_sequences_are_lost(loses: int) -> None:
    for moment in range(3, 90, 6):
        harness, _ = aged()
        harness.send(submit(1, [5] * 500, 30, ignore_eos=True), submit(2, [5] * 300 + [6] * 90, 30, ignore_eos=True))
        for _ in range(moment):
            harness.step()
        if loses:
            harness.lose(0)
            harness.turn()
            harness.open(0)
        harness.restart_kv()
        harness.turn()
        harness.settle()
        assert_correct(harness, 1)
        assert_correct(harness, 2)
        assert_idle(harness)
