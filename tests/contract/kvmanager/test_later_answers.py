"""What schedulers hear without having asked just now: parked answers, restated sequences, moves, changes by age."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from quire.v1 import executor_pb2, kvmanager_pb2, types_pb2
from services.common.errors import Reason
from tests.contract.kvmanager.conftest import (
    MODEL,
    WAIT,
    Executor,
    Scheduler,
    description,
    reservation,
    sealed,
    status,
)
from tests.contract.kvmanager.test_reserve_stream import GRANTED, NO_EXECUTOR, failure, space

PROMPT = range(14)
POLICY = "hot:128,int8:256,int4"


@pytest.fixture
async def executor(stub: Any) -> Executor:
    made = Executor(stub)
    await made.register(description(blocks=32))
    return made


def progress(sequence_id: int, computed: int, token_ids: tuple[int, ...] = ()) -> kvmanager_pb2.SequenceProgress:
    return kvmanager_pb2.SequenceProgress(sequence_id=sequence_id, computed_length=computed, token_ids=token_ids)


def held(sequence_id: int, blocks: list[int], **fields: Any) -> kvmanager_pb2.HeldSequence:
    return kvmanager_pb2.HeldSequence(
        sequence_id=sequence_id,
        blocks=[executor_pb2.BlockList(group_id=0, block_ids=blocks)],
        **{
            "executor_id": "e",
            "epoch": 1,
            "model_fingerprint": MODEL,
            "namespace": "default",
            "token_ids": range(10),
            "computed_length": 6,
            **fields,
        },
    )


def with_disk(blocks: int = 32) -> types_pb2.ExecutorDescription:
    made = description(blocks=blocks)
    made.pools.append(
        types_pb2.BlockPool(
            pool_id=7,
            group_id=0,
            tier=types_pb2.TIER_DISK,
            format=types_pb2.KV_FORMAT_BF16,
            block_count=40,
            first_block_id=100,
        )
    )
    return made


def with_ages() -> types_pb2.ExecutorDescription:
    """Blocks of 32 tokens in three formats."""
    made = description(blocks=24)
    made.kv_policy = POLICY
    made.groups[0].block_size = 32
    for number, format_ in enumerate((types_pb2.KV_FORMAT_INT8, types_pb2.KV_FORMAT_INT4), 1):
        made.pools.append(
            types_pb2.BlockPool(
                pool_id=number,
                group_id=0,
                tier=types_pb2.TIER_DEVICE,
                format=format_,
                block_count=12,
                first_block_id=100 * number,
            )
        )
    return made


# Parked reservations


async def test_the_second_of_two_equal_prompts_is_answered_when_the_first_is_computed(
    stub: Any, scheduler: Scheduler
) -> None:
    response = await scheduler.ask(reservations=[reservation(1, PROMPT), reservation(2, PROMPT)])
    assert [r.sequence_id for r in response.reservations] == [1]
    assert (await status(stub)).parked_count == 1
    response = await scheduler.ask(progress=[progress(1, 14)])
    (answer,) = response.reservations
    assert (answer.sequence_id, answer.outcome, answer.cached_tokens) == (2, GRANTED, 12)
    assert len(sealed(response)) == 3
    assert space(response) == [("e", 27, 32)]
    assert (await status(stub)).parked_count == 0


async def test_another_schedulers_progress_answers_too(stub: Any, scheduler: Scheduler) -> None:
    other = Scheduler(stub, "other")
    await other.hello()
    await scheduler.reserve(1, PROMPT)
    await other.tell(reservations=[reservation(1, PROMPT)])
    await other.tell()
    while not (await status(stub)).parked_count:
        await asyncio.sleep(0.01)
    await scheduler.ask(progress=[progress(1, 14)])
    (answer,) = (await other.read()).reservations
    assert (answer.outcome, answer.cached_tokens) == (GRANTED, 12)


async def test_a_lost_filler_is_answered_for(stub: Any, scheduler: Scheduler) -> None:
    other = Scheduler(stub, "other")
    await other.hello()
    await scheduler.reserve(1, PROMPT)
    await other.tell(reservations=[reservation(1, PROMPT)])
    while not (await status(stub)).parked_count:
        await asyncio.sleep(0.01)
    scheduler.call.cancel()
    (answer,) = (await other.read()).reservations
    assert (answer.outcome, answer.cached_tokens) == (GRANTED, 0)


async def test_a_cancelled_one_is_not_answered(stub: Any, scheduler: Scheduler) -> None:
    await scheduler.ask(reservations=[reservation(1, PROMPT), reservation(2, PROMPT)])
    await scheduler.tell(released_sequence_ids=[2])
    response = await scheduler.ask(progress=[progress(1, 14)])
    assert not response.reservations
    assert (await status(stub)).parked_count == 0


async def test_a_registration_answers_those_behind_a_replaced_executor(
    stub: Any, executor: Executor, scheduler: Scheduler
) -> None:
    await scheduler.ask(reservations=[reservation(1, PROMPT), reservation(2, PROMPT)])
    await executor.register(description(blocks=16))
    answers = []
    while not answers:
        answers = list((await scheduler.read()).reservations)
    assert [(a.sequence_id, a.outcome) for a in answers] == [(2, NO_EXECUTOR)]  # until its inventory is known
    assert space(await scheduler.read()) == [("e", 16, 16)]
    assert (await scheduler.reserve(2, PROMPT)).outcome == GRANTED


# Restated sequences


async def test_a_new_stream_states_what_it_holds(stub: Any, scheduler: Scheduler) -> None:
    await scheduler.reserve(1, range(10))
    await scheduler.reserve(2, range(50, 60))
    newer = Scheduler(stub)
    welcome = await newer.hello()
    assert welcome.lease_ms
    assert space(welcome) == [("e", 26, 32)]
    response = await newer.ask(held=[held(1, [0, 1, 2])], all_held_stated=True)
    assert space(response) == [("e", 29, 32)]
    assert not response.lost_sequence_ids
    assert len(sealed(response)) == 1
    assert (await failure(scheduler.call)).reason == Reason.STALE_EPOCH
    assert (await status(stub)).sequence_count == 1


async def test_what_is_not_there_any_more_is_named(stub: Any, scheduler: Scheduler) -> None:
    response = await scheduler.ask(held=[held(1, [0, 1, 2]), held(2, [2, 3, 4]), held(3, [90])], all_held_stated=True)
    assert list(response.lost_sequence_ids) == [2, 3]
    assert (await status(stub)).sequence_count == 1


async def test_an_executor_that_registers_later_is_waited_for(stub: Any) -> None:
    scheduler = Scheduler(stub)
    await scheduler.hello()
    await scheduler.tell(held=[held(1, [0, 1, 2]), held(2, [2, 3, 4])], all_held_stated=True)
    await scheduler.tell(progress=[progress(1, 9)], extend_sequence_ids=[1], extend_token_counts=[13])
    assert (await scheduler.reserve(9, [1])).outcome == NO_EXECUTOR  # the extension is not answered yet
    await Executor(stub).register()
    response = await scheduler.read()
    assert list(response.lost_sequence_ids) == [2]
    (extension,) = response.extensions
    assert (extension.sequence_id, extension.outcome) == (1, GRANTED)
    assert [list(group.block_ids) for group in extension.blocks] == [[3]]
    assert len(sealed(response)) == 2
    assert space(response) == [("e", 4, 8)]


async def test_requests_that_a_new_stream_does_not_repeat_are_not_answered(stub: Any, scheduler: Scheduler) -> None:
    await scheduler.ask(reservations=[reservation(1, PROMPT), reservation(2, PROMPT)])
    newer = Scheduler(stub)
    await newer.hello()
    response = await newer.ask(all_held_stated=True)
    assert space(response) == [("e", 32, 32)]
    assert not response.reservations
    assert (await newer.reserve(2, PROMPT)).outcome == GRANTED
    assert (await status(stub)).parked_count == 0


async def test_malformed_statements_change_nothing(stub: Any, scheduler: Scheduler) -> None:
    wrong = [
        held(1, [0, 0, 1]),
        held(2, [0], computed_length=9),
        held(3, [0, 1, 2], token_ids=[]),
        held(4, [0, 1, 2], token_ids=[1, -1]),
        held(5, [0, 1, 2], demotions=[executor_pb2.BlockDemotion(positions=[1])]),
        held(-6, [0, 1, 2]),
        kvmanager_pb2.HeldSequence(sequence_id=7, executor_id="e", model_fingerprint=MODEL, token_ids=[1], epoch=1),
    ]
    response = await scheduler.ask(held=wrong)
    assert list(response.lost_sequence_ids) == [1, 2, 3, 4, 5, -6, 7]
    (pool,) = (await status(stub)).pools
    assert pool.free_count == 32


# Moves


async def test_moves_go_to_the_scheduler_and_come_back_from_the_executor(stub: Any) -> None:
    executor, scheduler = Executor(stub), Scheduler(stub)
    await executor.register(with_disk())
    await scheduler.hello()
    operations: list[executor_pb2.BlockOperation] = []
    for sequence_id in range(1, 4):
        response = await scheduler.ask(reservations=[reservation(sequence_id, [sequence_id] * 49)])
        for of_executor in response.operations:
            assert (of_executor.executor_id, of_executor.epoch) == ("e", 1)
            operations += of_executor.operations
        await scheduler.ask(progress=[progress(sequence_id, 48)])
        await scheduler.ask(released_sequence_ids=[sequence_id])
    first = operations[0]
    assert first.kind == executor_pb2.BLOCK_OPERATION_KIND_OFFLOAD
    assert first.phase == executor_pb2.BLOCK_OPERATION_PHASE_BEFORE
    assert (first.source_pool_id, first.destination_pool_id) == (0, 7)
    assert first.source_block_id < 32
    assert 100 <= first.destination_block_id < 140
    assert len(first.key) == 32
    ids = [operation.operation_id for operation in operations]
    assert len(set(ids)) == len(ids)
    await executor.ask(epoch=1, done_operation_ids=ids)
    (space,) = (await scheduler.read()).space  # whoever waits for blocks hears of it
    assert space.coming_block_count == 0
    disk = (await status(stub)).pools[1]
    assert (disk.cached_count, disk.leased_count) == (len(ids), 0)

    await scheduler.tell(reservations=[reservation(9, [1] * 49)])
    (of_executor,) = (await scheduler.read()).operations
    loads = list(of_executor.operations)
    assert {load.kind for load in loads} == {executor_pb2.BLOCK_OPERATION_KIND_LOAD}
    assert (await status(stub)).parked_count == 1
    failed = [loads[-1].operation_id]
    await executor.ask(epoch=1, done_operation_ids=[load.operation_id for load in loads], failed_operation_ids=failed)
    answers = []
    while not answers:
        answers = list((await scheduler.read()).reservations)
    (answer,) = answers
    assert answer.outcome == GRANTED
    assert answer.cached_tokens % 4 == 0
    assert 0 < answer.cached_tokens <= 48
    await status(stub)


async def test_a_new_stream_gets_the_moves_of_the_older_one_after_its_welcome(stub: Any) -> None:
    executor, scheduler = Executor(stub), Scheduler(stub)
    await executor.register(with_disk())
    await scheduler.hello()
    sent: list[int] = []
    for sequence_id in range(1, 4):
        response = await scheduler.ask(reservations=[reservation(sequence_id, [sequence_id] * 49)])
        sent += [o.operation_id for of_executor in response.operations for o in of_executor.operations]
        await scheduler.ask(progress=[progress(sequence_id, 48)])
        await scheduler.ask(released_sequence_ids=[sequence_id])
    newer = Scheduler(stub)
    welcome = await newer.hello()
    assert welcome.lease_ms
    again = [o.operation_id for of_executor in welcome.operations for o in of_executor.operations]
    assert again == sent


# Formats by age


async def test_changes_come_with_the_slots_that_reach_beyond_them(stub: Any) -> None:
    executor, scheduler = Executor(stub), Scheduler(stub)
    await executor.register(with_ages())
    await scheduler.hello()
    granted = await scheduler.reserve(1, [1] * 400, kv_policy=POLICY)
    assert granted.outcome == GRANTED
    assert len(granted.blocks[0].block_ids) == 8
    (change,) = granted.demotions
    assert (change.sequence_id, change.group_id, change.at_length) == (1, 0, 256)
    assert (list(change.positions), list(change.block_ids)) == ([1, 2, 3], [100, 101, 102])
    assert list(change.writes) == [True, True, True]
    response = await scheduler.ask(extend_sequence_ids=[1], extend_token_counts=[400])
    (extension,) = response.extensions
    assert [change.at_length for change in extension.demotions] == [384]
    assert space(response) == [("e", 11, 24)]
    response = await scheduler.ask(progress=[progress(1, 288)])
    assert [block.block_id for block in sealed(response)][-3:] == [100, 101, 102]
    assert space(response) == [("e", 14, 24)]  # blocks that came free by growth are told without being asked for


async def test_a_policy_that_an_executor_does_not_keep_finds_none(stub: Any, scheduler: Scheduler) -> None:
    assert (await scheduler.reserve(1, [1] * 40, kv_policy=POLICY)).outcome == NO_EXECUTOR


async def test_nothing_more_is_said_to_an_idle_scheduler(scheduler: Scheduler) -> None:
    await scheduler.reserve(1, PROMPT)
    await scheduler.ask(released_sequence_ids=[1])
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(scheduler.call.read(), min(0.3, WAIT))
