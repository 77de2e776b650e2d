"""An executor's stream: registration, fencing, loss and return."""

from __future__ import annotations

from typing import Any

import pytest

from quire.v1 import kvmanager_pb2, types_pb2
from services.common.errors import Reason
from tests.contract.kvmanager.conftest import Executor, Scheduler, description, status
from tests.contract.kvmanager.test_reserve_stream import GRANTED, NO_EXECUTOR, failure, space


async def test_registration_is_acknowledged_with_the_epoch(stub: Any) -> None:
    assert await Executor(stub).register(epoch=3) == 3
    (pool,) = (await status(stub)).pools
    assert (pool.executor_id, pool.free_count) == ("e", 8)
    assert pool.pool == description().pools[0]


async def test_progress_alone_is_not_answered(stub: Any) -> None:
    executor = Executor(stub)
    await executor.register()
    await executor.call.write(kvmanager_pb2.ReportRequest(last_step=7))
    assert await executor.ask(epoch=4) == 4


async def test_a_first_message_without_description_ends_the_stream(stub: Any) -> None:
    executor = Executor(stub)
    await executor.call.write(kvmanager_pb2.ReportRequest(epoch=1))
    assert (await failure(executor.call)).reason == Reason.PROTOCOL


async def test_an_inventory_is_taken_as_the_answer_to_the_last_ask_alone(stub: Any) -> None:
    """A restarted kvmanager: whose scheduler comes after the executor, asks it again."""
    executor, scheduler = Executor(stub), Scheduler(stub)
    entered = await executor.enter()
    await scheduler.hello()
    await scheduler.tell(all_held_stated=True)
    again = await executor.read()
    assert again.ask > entered.ask > 0
    await executor.ask(answers=entered.ask)
    assert (await scheduler.reserve(1, range(8))).outcome == NO_EXECUTOR
    await executor.ask(answers=again.ask)
    assert space(await scheduler.read()) == [("e", 8, 8)]
    assert (await scheduler.reserve(1, range(8))).outcome == GRANTED


def with_pools(*pools: dict[str, Any], groups: int = 1) -> types_pb2.ExecutorDescription:
    made = description()
    del made.pools[:]
    del made.groups[:]
    made.groups.extend(types_pb2.CacheGroup(group_id=group, block_size=4) for group in range(groups))
    for index, fields in enumerate(pools):
        made.pools.append(types_pb2.BlockPool(**{"pool_id": index, "tier": 1, "format": 2, "block_count": 4, **fields}))
    return made


@pytest.mark.parametrize(
    ("described", "reason", "field"),
    [
        (description(name=""), Reason.INVALID_FIELD, "description.executor_id"),
        (with_pools({"group_id": 1}), Reason.INVALID_FIELD, "description.pools[0].group_id"),
        (with_pools({"tier": 0}), Reason.INVALID_FIELD, "description.pools[0].tier"),
        (with_pools({}, {"tier": 4}), Reason.UNSUPPORTED, "description.pools[1].tier"),
        (with_pools({}, {"tier": 3, "format": 5}), Reason.INVALID_FIELD, "description.pools.format"),
        (with_pools({"format": 0}), Reason.INVALID_FIELD, "description.pools[0].format"),
        (with_pools({"block_count": 0}), Reason.INVALID_FIELD, "description.pools[0].block_count"),
        (with_pools({"first_block_id": -1}), Reason.INVALID_FIELD, "description.pools[0].first_block_id"),
        (with_pools({"first_block_id": 2**31 - 3}), Reason.INVALID_FIELD, "description.pools[0].first_block_id"),
        (with_pools({}, {"first_block_id": 4}), Reason.INVALID_FIELD, "description.pools.format"),
        (with_pools({}, {"rank_nodes": [1]}), Reason.INVALID_FIELD, "description.pools.first_block_id"),
        (
            with_pools({}, {"rank_nodes": [1], "first_block_id": 4, "pool_id": 0}),
            Reason.INVALID_FIELD,
            "description.pools.pool_id",
        ),
        (with_pools({}, groups=2), Reason.INVALID_FIELD, "description.pools"),
    ],
)
async def test_bad_descriptions_are_refused_by_field(
    stub: Any, described: types_pb2.ExecutorDescription, reason: Reason, field: str
) -> None:
    executor = Executor(stub)
    await executor.call.write(kvmanager_pb2.ReportRequest(description=described))
    error = await failure(executor.call)
    assert error.reason == reason
    assert error.message.startswith(f"{field}: ")
    assert len((await status(stub)).pools) == 0


async def scheduler_of_a_lost_executor(stub: Any) -> Scheduler:
    """A scheduler that holds sequence 1 on an executor whose loss the kvmanager has noticed."""
    executor, scheduler = Executor(stub), Scheduler(stub)
    await executor.register()
    await scheduler.hello()
    await scheduler.reserve(1, range(8))
    await executor.lose()
    while (await scheduler.reserve(2, [9] * 8)).outcome != NO_EXECUTOR:
        await scheduler.ask(released_sequence_ids=[2])
    return scheduler


async def test_a_lost_executor_takes_nothing_until_it_is_back_with_what_it_held(stub: Any) -> None:
    scheduler = await scheduler_of_a_lost_executor(stub)
    assert (await status(stub)).pools[0].leased_count == 2
    back = Executor(stub)
    await back.register()
    assert space(await scheduler.read()) == [("e", 6, 8)]
    assert (await scheduler.reserve(2, [9] * 8)).outcome == GRANTED


async def test_an_executor_that_is_gone_leaves_with_its_last_sequence(stub: Any) -> None:
    scheduler = await scheduler_of_a_lost_executor(stub)
    await scheduler.tell(released_sequence_ids=[1])
    assert (await scheduler.reserve(3, range(8))).outcome == NO_EXECUTOR
    assert len((await status(stub)).pools) == 0


async def test_a_second_stream_of_an_executor_fences_the_first(stub: Any) -> None:
    first, second = Executor(stub), Executor(stub)
    await first.register()
    await second.register()
    assert (await failure(first.call)).reason == Reason.STALE_EPOCH
    assert await second.ask(epoch=2) == 2
    assert len((await status(stub)).pools) == 1


async def test_a_stream_belongs_to_one_executor(stub: Any) -> None:
    executor = Executor(stub)
    await executor.register()
    await executor.call.write(kvmanager_pb2.ReportRequest(description=description("other")))
    assert (await failure(executor.call)).reason == Reason.PROTOCOL
