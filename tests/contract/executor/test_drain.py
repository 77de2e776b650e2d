"""The end of an executor that was asked to end: it says so, finishes what it has, and lets go of its stream."""

from __future__ import annotations

import asyncio

import grpc

from tests.contract.executor.conftest import eventually, run
from tests.unit.executor.fake_backend import generate
from tests.unit.executor.plans import state, tokens_by_sequence

PROMPT = [5, 6, 7]


async def test_a_drain_is_announced_and_waits_for_what_runs(executor):
    executor.backend.step_seconds = 0.005
    stream = await run(executor)
    await stream.plan(enter=[state(1, PROMPT, range(16), max_tokens=40)], grants=[(1, 32, 1), (1, 1, 20)])
    await stream.next_results()
    draining = asyncio.create_task(executor.engine.drain(30.0))
    while (message := await stream.read()).WhichOneof("message") != "drain":
        stream.results.append(message.results)
    assert 0 < message.drain.remaining_seconds <= 30
    assert not draining.done()
    await stream.plan(grants=[(1, 1, 19)])
    assert tokens_by_sequence(await stream.until_ended(1)) == {1: generate(PROMPT, 40)}
    await draining
    code, details = await stream.status()
    assert (code, details) == (grpc.StatusCode.UNAVAILABLE, "the executor has ended")


async def test_an_idle_executor_ends_at_once_and_says_why(executor):
    stream = await run(executor)
    await asyncio.wait_for(executor.engine.drain(30.0), 20)
    assert (await stream.read()).WhichOneof("message") == "drain"
    assert (await stream.status())[0] == grpc.StatusCode.UNAVAILABLE


async def test_a_new_stream_hears_of_the_drain_first(executor):
    executor.backend.step_seconds = 0.005
    old = await run(executor)
    await old.plan(enter=[state(1, PROMPT, range(60), max_tokens=200)], grants=[(1, 32, 1), (1, 1, 199)])
    await old.next_results()
    draining = asyncio.create_task(executor.engine.drain(30.0))
    await eventually(lambda: executor.engine.draining)
    new = await run(executor)
    assert (await new.read()).WhichOneof("message") == "drain"
    await asyncio.wait_for(draining, 20)  # the new stream holds nothing
