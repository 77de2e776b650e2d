"""Loss of the scheduler, and clients that do not read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from quire.v1 import gateway_pb2, gateway_pb2_grpc, scheduler_pb2, types_pb2
from services.gateway.caller import EVERYONE
from tests.contract.gateway.conftest import Stack, eventually, running
from tests.contract.gateway.fake_scheduler import LENGTH, STOP, FakeScheduler
from tests.contract.gateway.test_generate import asked, reason_of
from tests.fixtures.vocabularies import EOS_ID


async def test_streams_go_on_after_a_loss(stack: Stack, tmp_path: Path) -> None:
    """E3: each token once; ended choices and held text survive; the seed stays the same."""
    request = asked(choice_count=2, request_id="r", stop={"stop": ["lost"], "max_tokens": 20}, priority=3)
    call = stack.inference.GenerateStream(request)
    submit = await stack.scheduler.heard(stack.scheduler.submits)
    await stack.scheduler.started(submit, cached=1)
    await stack.scheduler.tokens(submit, b"los")
    await stack.scheduler.tokens(submit, [*b"done", EOS_ID], choice=1, end=STOP)
    messages = aiter(call)
    got = [await anext(messages), await anext(messages)]
    await stack.scheduler.stop()
    await eventually(lambda: not stack.engine.ready)

    heir = FakeScheduler(stack.scheduler.target)
    await heir.start()
    again = await heir.heard(heir.submits)
    assert again.request_id == "r"
    assert again.sampling.seed == submit.sampling.seed
    assert (again.priority, again.stop.max_tokens) == (3, 20)
    assert [(bytes(p.token_ids[:4]), p.ended) for p in again.progress] == [(b"los", False), (b"done", True)]
    await heir.started(again, cached=5)
    await heir.tokens(again, b"st?!", position=2)  # one position again, as a late message would
    rest = [message async for message in messages]
    stop = await heir.heard(heir.stops)
    await heir.stop()
    texts = {0: "", 1: ""}
    for message in [*got, *rest]:
        texts[message.choice] += message.text
    assert texts == {0: "", 1: "done"}  # the stop string began before the loss and ended behind it
    assert (stop.handle, stop.choice, stop.output_length) == (again.handle, 0, 4)
    assert rest[-1].usage == types_pb2.Usage(prompt_tokens=3, completion_tokens=9, cached_tokens=1)


async def test_waiting_requests_fail_after_resume_seconds(tmp_path: Path) -> None:
    scheduler = FakeScheduler(f"unix:{tmp_path}/s.sock")
    await scheduler.start()
    async with running(tmp_path, scheduler, resume_seconds=0.5) as stack:
        await eventually(lambda: stack.engine.ready)
        call = stack.inference.GenerateStream(asked())
        submit = await scheduler.heard(scheduler.submits)
        await scheduler.started(submit)
        await scheduler.tokens(submit, b"ab")
        messages = aiter(call)
        assert (await anext(messages)).text == "ab"
        await scheduler.stop()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(anext(messages), 5)
        assert (caught.value.code(), reason_of(caught.value)) == (grpc.StatusCode.UNAVAILABLE, "SCHEDULER_LOST")
        with pytest.raises(grpc.aio.AioRpcError) as caught:  # a new request waits as long, and no longer
            await asyncio.wait_for(stack.inference.GenerateStream(asked()).read(), 5)
        assert reason_of(caught.value) == "SCHEDULER_LOST"
        assert len(stack.engine._table) == 0


async def test_an_end_lost_with_the_scheduler_is_known_from_the_tokens(stack: Stack) -> None:
    """The last token came, the word that it was the last did not: nothing is computed behind it."""
    call = stack.inference.GenerateStream(asked())
    submit = await stack.scheduler.heard(stack.scheduler.submits)
    await stack.scheduler.started(submit)
    await stack.scheduler.tokens(submit, [*b"bye", EOS_ID])
    messages = aiter(call)
    first = await anext(messages)
    await stack.scheduler.stop()
    (last,) = [message async for message in messages]
    assert first.text + last.text == "bye"
    assert (last.finish_reason, last.usage.completion_tokens) == (STOP, 4)
    await stack.scheduler.start()


async def test_requests_wait_until_their_model_is_back(stack: Stack) -> None:
    call = stack.inference.GenerateStream(asked())
    await stack.scheduler.heard(stack.scheduler.submits)
    await stack.scheduler.stop()
    heir = FakeScheduler(stack.scheduler.target)
    heir.models = []
    await heir.start()
    await heir.heard(heir.hellos)
    await asyncio.sleep(0.3)
    assert heir.submits == []
    heir.models = [heir.model]
    await heir.tell_models()
    submit = await heir.heard(heir.submits)
    await heir.started(submit)
    await heir.tokens(submit, b"x", end=LENGTH)
    assert [m.text async for m in call] == ["x"]
    await heir.stop()


async def test_the_model_picked_for_an_alias_stays_after_a_loss(stack: Stack) -> None:
    """The scheduler names it when it begins; before that, any member will do."""
    alias = types_pb2.ModelDescription()
    alias.CopyFrom(stack.scheduler.model)
    alias.name, alias.fingerprint = "auto", ""
    alias.members.extend(["m", "other"])
    stack.scheduler.models = [stack.scheduler.model, alias]
    await stack.scheduler.tell_models()
    await eventually(lambda: len(stack.engine.models(EVERYONE)) == 2)
    streams = {}
    for name in ("waits", "runs"):
        request = asked(request_id=name)
        request.input.model = "auto"
        streams[name] = aiter(stack.inference.GenerateStream(request))
    await stack.scheduler.heard(stack.scheduler.submits, 2)
    asked_for = {submit.request_id: submit for submit in stack.scheduler.submits}
    assert {submit.model for submit in asked_for.values()} == {"auto"}
    runs = asked_for["runs"]
    await stack.scheduler.say(started=[scheduler_pb2.RequestStarted(handle=runs.handle, model="m")])
    await stack.scheduler.tokens(runs, b"a")
    assert (await anext(streams["runs"])).model == "m"
    await stack.scheduler.stop()
    await eventually(lambda: not stack.engine.ready)
    heir = FakeScheduler(stack.scheduler.target)
    heir.models = stack.scheduler.models
    await heir.start()
    await heir.heard(heir.submits, 2)
    assert {again.request_id: again.model for again in heir.submits} == {"waits": "auto", "runs": "m"}
    for again in heir.submits:
        await heir.say(started=[scheduler_pb2.RequestStarted(handle=again.handle, model="m")])
        await heir.tokens(again, b"b", position=len(again.progress), end=LENGTH)
    for stream in streams.values():
        assert [(message.text, message.model) async for message in stream] == [("b", "m")]
    await heir.stop()


@asynccontextmanager
async def small_window(stack: Stack) -> AsyncIterator[gateway_pb2_grpc.InferenceServiceAsyncStub]:
    """A client that takes 64 KiB in without reading, instead of megabytes."""
    options = [("grpc.http2.bdp_probe", 0)]
    async with grpc.aio.insecure_channel(stack.engine.settings.listen, options=options) as channel:
        yield gateway_pb2_grpc.InferenceServiceStub(channel)


async def fill(scheduler: FakeScheduler, submit: scheduler_pb2.Submit) -> int:
    """Sends tokens until the gateway holds the request; returns their number."""
    position = 0
    while not scheduler.holds and position < 400_000:
        await scheduler.tokens(submit, b"x" * 400, position=position)
        position += 400
        await asyncio.sleep(0)
    return position


async def count_tokens(call: AsyncIterator[gateway_pb2.GenerateStreamResponse]) -> int:
    return sum([len(message.token_ids) async for message in call])


async def test_slow_readers_are_held_then_cut(tmp_path: Path) -> None:
    """L4: unread tokens are bounded, a normal stream goes on, and the handler ends though nothing is ever read."""
    scheduler = FakeScheduler(f"unix:{tmp_path}/s.sock", context_length=1 << 20)
    await scheduler.start()
    async with (
        running(tmp_path, scheduler, hold_tokens=500, slow_reader_seconds=0.5) as stack,
        small_window(stack) as inference,
    ):
        await eventually(lambda: stack.engine.ready)
        slow = inference.GenerateStream(asked())
        submit = await scheduler.heard(scheduler.submits)
        await scheduler.started(submit)
        await fill(scheduler, submit)
        hold = await scheduler.heard(scheduler.holds)
        assert (hold.handle, hold.held) == (submit.handle, True)

        normal = stack.inference.GenerateStream(asked())
        other = await scheduler.heard(scheduler.submits, 2)
        await scheduler.started(other)
        await scheduler.tokens(other, b"fine", end=LENGTH)
        assert "".join([m.text async for m in normal]) == "fine"

        assert await scheduler.heard(scheduler.cancels) == submit.handle
        await eventually(lambda: len(stack.engine._table) == 0)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in slow:
                pass
        assert (caught.value.code(), reason_of(caught.value)) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "SLOW_READER")
    await scheduler.stop()


async def test_a_held_reader_that_comes_back_goes_on(tmp_path: Path) -> None:
    scheduler = FakeScheduler(f"unix:{tmp_path}/s.sock", context_length=1 << 20)
    await scheduler.start()
    async with (
        running(tmp_path, scheduler, hold_tokens=500, slow_reader_seconds=30) as stack,
        small_window(stack) as inference,
    ):
        await eventually(lambda: stack.engine.ready)
        call = inference.GenerateStream(asked())
        submit = await scheduler.heard(scheduler.submits)
        await scheduler.started(submit)
        position = await fill(scheduler, submit)
        reading = asyncio.ensure_future(count_tokens(call))
        await scheduler.heard(scheduler.holds, 2)
        assert [hold.held for hold in scheduler.holds] == [True, False]
        await scheduler.tokens(submit, b"end", position=position, end=LENGTH)
        assert await reading == position + 3
    await scheduler.stop()


async def test_a_reader_that_comes_back_within_the_grace_meets_its_error(tmp_path: Path) -> None:
    scheduler = FakeScheduler(f"unix:{tmp_path}/s.sock")
    await scheduler.start()
    async with running(tmp_path, scheduler, slow_reader_seconds=0.3) as stack:
        await eventually(lambda: stack.engine.ready)
        cut: list[bool] = []
        generation = stack.engine.generate(
            gateway_pb2.GenerationInput(text="a"), caller=EVERYONE, deadline=None, on_cut=lambda: cut.append(True)
        )
        first = asyncio.ensure_future(anext(generation))
        submit = await scheduler.heard(scheduler.submits)
        await scheduler.started(submit)
        await first
        await scheduler.tokens(submit, b"abc")
        assert await scheduler.heard(scheduler.cancels) == submit.handle
        with pytest.raises(Exception, match="unread too long"):
            await anext(generation)
        assert cut == []
    await scheduler.stop()
