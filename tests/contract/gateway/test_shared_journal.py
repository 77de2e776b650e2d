"""Streams that go on at another gateway, found through a real Redis; and that Redis lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import pytest

from quire.v1 import gateway_pb2, scheduler_pb2
from services.common.errors import Reason
from services.gateway.journal.record import record_is_whole
from tests.contract.gateway.conftest import Stack, eventually, running
from tests.contract.gateway.fake_scheduler import LENGTH, FakeScheduler
from tests.contract.gateway.test_generate import asked, reason_of
from tests.contract.gateway.test_resume import again, joined, lose, rest_of
from tests.fixtures.redis_server import RedisServer

WINDOW = 20.0


@pytest.fixture
async def redis(tmp_path: Path) -> AsyncIterator[RedisServer]:
    server = RedisServer(tmp_path)
    server.start()
    yield server
    server.kill()


@pytest.fixture
async def pair(tmp_path: Path, redis: RedisServer) -> AsyncIterator[list[Stack]]:
    """Two gateways, each with a scheduler that the test plays: what one says, the other does not hear."""
    async with AsyncExitStack() as opened:
        made = []
        for name in ("a", "b"):
            scheduler = FakeScheduler(f"unix:{tmp_path}/{name}-scheduler.sock")
            await scheduler.start()
            opened.push_async_callback(scheduler.stop)
            settings = {"resume_window": WINDOW, "journal": "redis", "redis": redis.url}
            stack = await opened.enter_async_context(running(tmp_path, scheduler, name=name, **settings))
            await eventually(lambda: stack.engine.ready)  # noqa: B023  # awaited here
            made.append(stack)
        yield made


async def begun(stack: Stack, request: gateway_pb2.GenerateStreamRequest) -> tuple[scheduler_pb2.Submit, list, object]:
    call = stack.inference.GenerateStream(request)
    submit = await stack.scheduler.heard(stack.scheduler.submits)
    await stack.scheduler.started(submit, cached=1)
    await stack.scheduler.tokens(submit, b"Hel")
    return submit, [await call.read()], call


async def written(stack: Stack) -> None:
    """All that happened is in the journal."""
    journal = stack.engine._journal
    assert journal is not None

    def done() -> bool:
        return not journal._changed and not journal._new

    await eventually(done)
    await asyncio.sleep(0.25)
    await eventually(done)


async def test_a_stream_goes_on_at_another_gateway(pair: list[Stack]) -> None:
    """It has what was written; its scheduler has no such request here, so that the rest is computed from there."""
    first, second = pair
    request = asked(request_id="mine", sampling={"temperature": 1.0})
    submit, got, call = await begun(first, request)
    await written(first)
    await first.scheduler.tokens(submit, b"lo", position=3)
    got.append(await call.read())
    resumed = second.inference.GenerateStream(again(request, got[-1].event_id))
    there = await second.scheduler.heard(second.scheduler.submits)
    assert (there.request_id, there.sampling.seed, there.keep_ms) == ("mine", submit.sampling.seed, 1000 * WINDOW)
    known = bytes(there.progress[0].token_ids)
    assert known in (b"Hel", b"Hello")
    await second.scheduler.started(there)
    await second.scheduler.tokens(there, b"Hello, you"[len(known) :], position=len(known), end=LENGTH)
    rest = [message async for message in resumed]
    assert joined([*got, *rest]) == ("Hello, you", list(b"Hello, you"))
    assert rest[-1].usage.cached_tokens == 1
    await written(second)
    record = await second.engine._journal.read("default", "mine")  # it goes on where the first gateway wrote it
    assert record is not None
    assert record_is_whole(*record)


async def test_one_scheduler_is_attached_to(tmp_path: Path, redis: RedisServer, scheduler: FakeScheduler) -> None:
    """It still runs there: nothing is submitted again, and the first gateway hears that it is over."""
    settings = {"resume_window": WINDOW, "journal": "redis", "redis": redis.url}
    async with (
        running(tmp_path, scheduler, name="a", **settings) as first,
        running(tmp_path, scheduler, name="b", **settings) as second,
    ):
        await eventually(lambda: first.engine.ready and second.engine.ready)
        request = asked(request_id="mine")
        call = first.inference.GenerateStream(request)
        submit = await scheduler.heard(scheduler.submits)
        scheduler.turn_to(submit)
        await scheduler.started(submit)
        await scheduler.tokens(submit, b"Hel")
        got = [await call.read()]
        await written(first)
        resumed = second.inference.GenerateStream(again(request, got[-1].event_id))
        attach = await scheduler.heard(scheduler.attaches)
        assert (attach.request_id, attach.tenant, list(attach.next_positions)) == ("mine", "default", [3])
        await scheduler.fail(submit, Reason.TAKEN_OVER)  # as a real one tells the first gateway
        scheduler.turn_to(attach)
        await scheduler.started(attach)
        await scheduler.tokens(attach, b"lo", position=3, end=LENGTH)
        assert joined([*got, *[message async for message in resumed]]) == ("Hello", list(b"Hello"))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert reason_of(caught.value) == "TAKEN_OVER"
        assert len(scheduler.submits) == 1


async def test_what_ended_is_told_by_any_gateway(pair: list[Stack]) -> None:
    """Also to whoever sends the same again; and its id is free for something else."""
    first, second = pair
    request = asked(request_id="mine")
    submit, got, call = await begun(first, request)
    await first.scheduler.tokens(submit, b"lo", position=3, end=LENGTH)
    got += await rest_of(call)
    await written(first)
    rest = [message async for message in second.inference.GenerateStream(again(request, got[0].event_id))]
    assert joined([got[0], *rest]) == ("Hello", list(b"Hello"))
    answer = await second.inference.Generate(gateway_pb2.GenerateRequest(input=request.input))
    assert (answer.choices[0].text, answer.usage.cached_tokens) == ("Hello", 1)
    assert second.scheduler.submits == []
    other = second.inference.GenerateStream(asked("other", request_id="mine"))
    assert (await second.scheduler.heard(second.scheduler.submits)).request_id == "mine"
    other.cancel()


async def test_a_running_id_of_another_request_is_refused(pair: list[Stack]) -> None:
    first, second = pair
    _, _, call = await begun(first, asked(request_id="mine"))
    await written(first)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await second.inference.GenerateStream(asked("other", request_id="mine")).read()
    assert reason_of(caught.value) == "ALREADY_EXISTS"
    call.cancel()


async def test_a_stream_is_cancelled_from_elsewhere(
    tmp_path: Path, redis: RedisServer, scheduler: FakeScheduler
) -> None:
    settings = {"resume_window": WINDOW, "journal": "redis", "redis": redis.url}
    async with (
        running(tmp_path, scheduler, name="a", **settings) as first,
        running(tmp_path, scheduler, name="b", **settings) as second,
    ):
        await eventually(lambda: first.engine.ready and second.engine.ready)
        call = first.inference.GenerateStream(asked(request_id="mine"))
        submit = await scheduler.heard(scheduler.submits)
        scheduler.turn_to(submit)
        await scheduler.started(submit)
        await written(first)
        await second.inference.Cancel(gateway_pb2.CancelRequest(request_id="mine"))
        attach = await scheduler.heard(scheduler.attaches)
        assert await scheduler.heard(scheduler.cancels) == attach.handle
        call.cancel()


async def test_redis_is_killed(pair: list[Stack], redis: RedisServer) -> None:
    """Streams go on. What cannot be found is said to be so; what Redis forgot is written again."""
    first, second = pair
    request = asked(request_id="mine")
    submit, got, call = await begun(first, request)
    await written(first)
    await asyncio.to_thread(redis.kill)
    await first.scheduler.tokens(submit, b"lo", position=3)
    got.append(await asyncio.wait_for(call.read(), 5))
    fresh = first.inference.GenerateStream(asked(request_id="fresh"))
    late = await first.scheduler.heard(first.scheduler.submits, 2)
    await first.scheduler.started(late)
    await first.scheduler.tokens(late, b"x", end=LENGTH)
    assert [message.text async for message in fresh] == ["x"]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await second.inference.GenerateStream(again(request, got[-1].event_id)).read()
    assert (caught.value.code(), reason_of(caught.value)) == (grpc.StatusCode.UNAVAILABLE, "STORE_LOST")
    await asyncio.to_thread(redis.start)
    journal = first.engine._journal
    assert journal is not None

    async def is_back() -> bool:
        try:
            record = await journal.read("default", "mine")
        except Exception:
            return False
        return record is not None and sum(len(c.token_ids) for piece in record[1] for c in piece.choices) == 5

    async with asyncio.timeout(20):
        while not await is_back():
            await asyncio.sleep(0.05)
    resumed = second.inference.GenerateStream(again(request, got[-1].event_id))
    there = await second.scheduler.heard(second.scheduler.submits)
    assert bytes(there.progress[0].token_ids) == b"Hello"
    await second.scheduler.started(there)
    await second.scheduler.tokens(there, b"!", position=5, end=LENGTH)
    assert joined([*got, *[message async for message in resumed]]) == ("Hello!", list(b"Hello!"))


async def test_what_nobody_comes_back_for_leaves_nothing(
    tmp_path: Path, redis: RedisServer, scheduler: FakeScheduler
) -> None:
    async with running(tmp_path, scheduler, resume_window=1.0, journal="redis", redis=redis.url) as stack:
        await eventually(lambda: stack.engine.ready)
        _, _, call = await begun(stack, asked(request_id="mine"))
        await written(stack)
        journal = stack.engine._journal
        assert journal is not None
        assert await journal.read("default", "mine") is not None
        await lose(call, stack)
        await scheduler.heard(scheduler.cancels)
        async with asyncio.timeout(10):
            while await journal._store.client.keys("quire:journal:*"):
                await asyncio.sleep(0.05)
