"""One gateway and several schedulers: what runs goes on when one is lost, and new requests go where they can."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest

from services.common.errors import Reason
from services.gateway.caller import EVERYONE
from tests.contract.gateway.conftest import Stack, eventually, running
from tests.contract.gateway.fake_scheduler import LENGTH, FakeScheduler
from tests.contract.gateway.test_generate import asked, reason_of
from tests.contract.gateway.test_resume import rest_of


@pytest.fixture
async def two(tmp_path: Path) -> AsyncIterator[tuple[Stack, list[FakeScheduler]]]:
    async with AsyncExitStack() as opened:
        schedulers = []
        for name in ("one", "two"):
            scheduler = FakeScheduler(f"unix:{tmp_path}/{name}.sock")
            await scheduler.start()
            opened.push_async_callback(scheduler.stop)
            schedulers.append(scheduler)
        stack = await opened.enter_async_context(running(tmp_path, *schedulers))
        await eventually(lambda: all(side.connected for side in stack.engine._links.placing.sides))
        yield stack, schedulers


async def ask(stack: Stack, schedulers: list[FakeScheduler], text: str) -> tuple[Any, FakeScheduler, FakeScheduler]:
    """The call, the scheduler that got it and the other one."""
    before = [len(one.submits) for one in schedulers]
    call = stack.inference.GenerateStream(asked(text))
    await eventually(lambda: [len(one.submits) for one in schedulers] != before)
    first = 0 if len(schedulers[0].submits) > before[0] else 1
    return call, schedulers[first], schedulers[1 - first]


async def finish(call: Any, scheduler: FakeScheduler) -> None:
    submit = scheduler.submits[-1]
    await scheduler.started(submit)
    await scheduler.tokens(submit, b"x", end=LENGTH)
    assert [message.text async for message in call] == ["x"]


async def test_the_same_beginning_goes_to_the_same_scheduler(two: tuple[Stack, list[FakeScheduler]]) -> None:
    stack, schedulers = two
    places: dict[str, set[FakeScheduler]] = {}
    for _ in range(2):
        for index in range(16):
            call, scheduler, _ = await ask(stack, schedulers, f"{index} beginning")
            places.setdefault(f"{index}", set()).add(scheduler)
            await finish(call, scheduler)
    assert all(len(found) == 1 for found in places.values())
    assert len(set.union(*places.values())) == 2


async def test_what_runs_goes_on_at_the_other_one(two: tuple[Stack, list[FakeScheduler]]) -> None:
    stack, schedulers = two
    call, scheduler, other = await ask(stack, schedulers, "hi")
    submit = scheduler.submits[-1]
    await scheduler.started(submit)
    await scheduler.tokens(submit, b"ab")
    first = await call.read()
    await scheduler.stop()
    again = await other.heard(other.submits, len(other.submits) + 1)
    assert bytes(again.progress[0].token_ids) == b"ab"
    await other.started(again)
    await other.tokens(again, b"c", position=2, end=LENGTH)
    assert first.text + "".join([message.text for message in await rest_of(call)]) == "abc"
    assert stack.engine.ready
    await finish((await ask(stack, schedulers, "hi"))[0], other)
    await scheduler.start()


async def test_an_absence_before_the_beginning_is_nobodys_business(two: tuple[Stack, list[FakeScheduler]]) -> None:
    stack, schedulers = two
    call, scheduler, other = await ask(stack, schedulers, "hi")
    count = len(other.submits)
    await scheduler.fail(scheduler.submits[-1], Reason.NO_EXECUTOR)
    await other.heard(other.submits, count + 1)
    await finish(call, other)
    assert stack.registry.get_sample_value("quire_gateway_attempts_total", {"why": "retry"}) == 1


async def test_models_of_all_schedulers_are_offered(two: tuple[Stack, list[FakeScheduler]]) -> None:
    stack, (first, second) = two
    model = type(second.model)()
    model.CopyFrom(second.model)
    model.name = "only-here"
    second.models = [second.model, model]
    await second.tell_models()
    await eventually(lambda: len(stack.engine.models(EVERYONE)) == 2)
    call = stack.inference.GenerateStream(asked(model="only-here"))
    await second.heard(second.submits)
    await finish(call, second)
    assert first.submits == []


async def test_a_model_whose_requests_fail_is_left_alone_for_a_while(stack: Stack) -> None:
    """The breaker: told at once, with the time to come back; and it closes again by itself."""
    scheduler = stack.scheduler
    for index in range(20):
        call = stack.inference.GenerateStream(asked())
        await scheduler.fail(await scheduler.heard(scheduler.submits, index + 1), Reason.INTERNAL)
        with pytest.raises(grpc.aio.AioRpcError):
            await call.read()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stack.inference.GenerateStream(asked()).read()
    assert (caught.value.code(), reason_of(caught.value)) == (grpc.StatusCode.UNAVAILABLE, "CIRCUIT_OPEN")
    labels = {"scheduler": scheduler.target, "model_name": "m"}
    assert stack.registry.get_sample_value("quire_gateway_breaker_state", labels) == 2
    assert stack.registry.get_sample_value("quire_gateway_shed_total", {"why": "circuit_open"}) == 1
    await asyncio.sleep(2.1)
    for _ in range(3):
        call = stack.inference.GenerateStream(asked())
        await scheduler.heard(scheduler.submits, len(scheduler.submits) + 1)
        await finish(call, scheduler)
    assert stack.registry.get_sample_value("quire_gateway_breaker_state", labels) == 0


async def test_what_would_wait_too_long_is_refused_with_the_time_to_come_back(
    tmp_path: Path, scheduler: FakeScheduler
) -> None:
    async with running(tmp_path, scheduler, max_queue_seconds=0.3) as stack:
        await eventually(lambda: stack.engine.ready)
        waiting = stack.inference.GenerateStream(asked())
        await scheduler.heard(scheduler.submits)
        await asyncio.sleep(0.4)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stack.inference.GenerateStream(asked()).read()
        assert reason_of(caught.value) == "QUEUE_FULL"
        assert stack.registry.get_sample_value("quire_gateway_shed_total", {"why": "queue_time"}) == 1
        await finish(waiting, scheduler)
        call = stack.inference.GenerateStream(asked())
        await scheduler.heard(scheduler.submits, 2)
        await finish(call, scheduler)


async def test_open_requests_take_so_much_memory_and_no_more(tmp_path: Path, scheduler: FakeScheduler) -> None:
    async with running(tmp_path, scheduler, max_open_tokens=3 * 2048) as stack:
        await eventually(lambda: stack.engine.ready)
        calls = [stack.inference.GenerateStream(asked()) for _ in range(3)]
        await scheduler.heard(scheduler.submits, 3)
        with pytest.raises(grpc.aio.AioRpcError, match="max_open_tokens") as caught:
            await stack.inference.GenerateStream(asked()).read()
        assert reason_of(caught.value) == "QUEUE_FULL"
        for call in calls:
            call.cancel()
        await eventually(lambda: len(stack.engine._table) == 0)
        call = stack.inference.GenerateStream(asked())
        await scheduler.heard(scheduler.submits, 4)
        await finish(call, scheduler)
