"""Followers of KV events: live, from a number, too late, too slow, and wrong."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry

from quire.v1 import kvmanager_pb2, kvmanager_pb2_grpc
from services.common.errors import QuireError, Reason, from_rpc_error
from services.common.rpc import channel
from services.kvmanager.main import build
from services.kvmanager.settings import KvManagerSettings
from tests.contract.kvmanager.conftest import WAIT, Executor, Scheduler, description

HISTORY = 40


async def serve(folder: Path, history: int) -> AsyncIterator[Any]:
    settings = KvManagerSettings(
        listen=f"unix:{folder}/kv.sock", metrics_listen="", drain_seconds=0, event_history=history
    )
    server, servicer = build(settings, CollectorRegistry())
    await server.start()
    await server.set_ready(True)
    async with channel(settings.listen, settings) as peer:
        yield kvmanager_pb2_grpc.KvManagerServiceStub(peer)
    await servicer.close()
    await server.grpc.stop(1.0)


@pytest.fixture
async def small(tmp_path: Path) -> AsyncIterator[Any]:
    """A kvmanager that keeps few events."""
    async for stub in serve(tmp_path, HISTORY):
        yield stub


def follow(stub: Any, start: int) -> Any:
    return stub.SubscribeEvents(kvmanager_pb2.SubscribeEventsRequest(start_sequence_number=start))


async def read(call: Any) -> kvmanager_pb2.SubscribeEventsResponse:
    message = await asyncio.wait_for(call.read(), WAIT)
    assert message is not grpc.aio.EOF, await call.code()
    return message


async def refused(call: Any) -> QuireError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rest(call)
    return from_rpc_error(caught.value, Reason.KVMANAGER_LOST)


async def rest(call: Any) -> None:
    while await asyncio.wait_for(call.read(), WAIT) is not grpc.aio.EOF:
        pass


async def peers(stub: Any, blocks: int = 8) -> Scheduler:
    await Executor(stub).register(description(blocks=blocks))
    scheduler = Scheduler(stub)
    await scheduler.hello()
    return scheduler


async def serve_prompt(scheduler: Scheduler, sequence_id: int, token: int, length: int = 9) -> None:
    """Seals all blocks that are full, by default two, and leaves them cached."""
    await scheduler.reserve(sequence_id, [token] * length)
    progress = kvmanager_pb2.SequenceProgress(sequence_id=sequence_id, computed_length=length)
    await scheduler.ask(progress=[progress])
    await scheduler.ask(released_sequence_ids=[sequence_id])


async def test_a_follower_hears_of_blocks_as_they_come_and_go(stub: Any) -> None:
    scheduler = await peers(stub, blocks=4)
    await serve_prompt(scheduler, 1, 1)
    replay = follow(stub, 1)
    batch = await read(replay)
    assert (batch.sequence_number, batch.executor_id, batch.cleared) == (1, "e", False)
    assert batch.timestamp_ms > 1_600_000_000_000
    first, second = batch.stored
    assert (first.parent_key, list(first.token_ids), first.block_size) == (b"", [1] * 4, 4)
    assert second.parent_key == first.key
    assert len(second.key) == 32
    assert first.key != second.key
    await serve_prompt(scheduler, 2, 2)  # takes a block from the first
    batches = [await read(replay)]
    while not batches[-1].stored:
        batches.append(await read(replay))
    removed = [event.key for batch in batches for event in batch.removed]
    assert removed == [second.key]  # the leaf goes first
    assert [batch.sequence_number for batch in batches] == list(range(2, 2 + len(batches)))


async def test_live_followers_hear_what_happens_from_now_on(stub: Any) -> None:
    scheduler = await peers(stub)
    await serve_prompt(scheduler, 1, 1)
    call = follow(stub, 0)
    waiting = asyncio.ensure_future(read(call))
    await asyncio.sleep(0.2)
    await serve_prompt(scheduler, 2, 2)
    batch = await waiting
    assert [list(event.token_ids) for event in batch.stored] == [[2] * 4, [2] * 4]


async def test_several_followers_hear_the_same(stub: Any) -> None:
    scheduler = await peers(stub)
    await serve_prompt(scheduler, 1, 1)
    calls = [follow(stub, 1) for _ in range(3)]
    assert len({(await read(call)).SerializeToString() for call in calls}) == 1


async def test_a_replaced_executors_content_is_cleared(stub: Any) -> None:
    executor = Executor(stub)
    await executor.register()
    scheduler = Scheduler(stub)
    await scheduler.hello()
    await serve_prompt(scheduler, 1, 1)
    await executor.register(description(blocks=9))
    call = follow(stub, 1)
    assert not (await read(call)).cleared
    batch = await read(call)
    assert (batch.cleared, batch.executor_id) == (True, "e")


@pytest.mark.parametrize("start", [2, 1000, 2**62])
async def test_numbers_that_are_not_kept_are_out_of_range(stub: Any, start: int) -> None:
    error = await refused(follow(stub, start))
    assert error.reason == Reason.OUT_OF_RANGE
    assert "start_sequence_number" in str(error.field) or "kept" in error.message


async def test_the_next_number_is_waited_for(stub: Any) -> None:
    call = follow(stub, 1)  # nothing has happened yet
    waiting = asyncio.ensure_future(read(call))
    scheduler = await peers(stub)
    await serve_prompt(scheduler, 1, 1)
    assert (await waiting).sequence_number == 1


async def test_negative_numbers_are_refused(stub: Any) -> None:
    assert (await refused(follow(stub, -1))).reason == Reason.INVALID_FIELD


async def test_what_is_too_old_is_out_of_range(small: Any) -> None:
    scheduler = await peers(small)
    for sequence_id in range(1, HISTORY):
        await serve_prompt(scheduler, sequence_id, sequence_id)
    assert (await refused(follow(small, 1))).reason == Reason.OUT_OF_RANGE


async def test_a_slow_follower_is_told_that_it_missed_some(small: Any) -> None:
    scheduler = await peers(small, blocks=1010)
    await serve_prompt(scheduler, 1, 1)
    call = follow(small, 1)
    assert (await read(call)).sequence_number == 1
    # It reads nothing more until the transport's buffers are full and the log has gone on without it.
    for sequence_id in range(2, 150):
        await serve_prompt(scheduler, sequence_id, sequence_id, length=4001)
    numbers: list[int] = []

    async def note() -> None:
        while (message := await asyncio.wait_for(call.read(), WAIT)) is not grpc.aio.EOF:
            numbers.append(message.sequence_number)

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await note()
    assert numbers == list(range(2, 2 + len(numbers)))  # without gaps as far as it got
    assert from_rpc_error(caught.value, Reason.KVMANAGER_LOST).reason == Reason.SLOW_READER


async def test_a_kvmanager_without_events_says_so(tmp_path: Path) -> None:
    async for stub in serve(tmp_path, 0):
        assert (await refused(follow(stub, 0))).reason == Reason.UNSUPPORTED
