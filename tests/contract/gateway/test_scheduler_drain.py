"""A scheduler that is about to end: what it does not take any more is the next one's, and no client hears of it."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from quire.client import Client, ClientError
from quire.v1 import gateway_pb2, scheduler_pb2
from services.common.errors import Reason
from tests.contract.gateway.conftest import Stack, eventually
from tests.contract.gateway.fake_scheduler import STOP, FakeScheduler
from tests.contract.gateway.test_generate import asked
from tests.fixtures.vocabularies import EOS_ID


async def test_what_a_draining_scheduler_refuses_is_the_next_ones(stack: Stack) -> None:
    scheduler = stack.scheduler
    running = stack.inference.Generate(gateway_pb2.GenerateRequest(input=asked(choice_count=2).input))
    submit = await scheduler.heard(scheduler.submits)
    await scheduler.started(submit)
    refused = stack.inference.Generate(
        gateway_pb2.GenerateRequest(input=asked(request_id="late", choice_count=2).input)
    )
    for choice in range(2):
        await scheduler.fail(await scheduler.heard(scheduler.submits, 2), Reason.DRAINING, choice)
    await eventually(lambda: stack.engine._links.placing.sides[0].drains)
    later = stack.inference.Generate(gateway_pb2.GenerateRequest(input=asked(request_id="later").input))
    await eventually(lambda: len(stack.engine._table) == 3)
    stack.engine._links.expire(asyncio.get_running_loop().time() + 1e6)  # nobody is late yet
    for choice in range(2):  # what runs ends where it is
        await scheduler.tokens(submit, [*b"done", EOS_ID], choice=choice, end=STOP)
    assert [choice.text for choice in (await running).choices] == ["done"] * 2
    assert len(scheduler.submits) == 2

    await scheduler.stop()
    heir = FakeScheduler(scheduler.target)
    await heir.start()
    await heir.heard(heir.submits, 2)
    for again in heir.submits:
        await heir.started(again)
        for choice in range(again.choice_count):
            await heir.tokens(again, [*b"here", EOS_ID], choice=choice, end=STOP)
    assert [choice.text for choice in (await refused).choices] == ["here"] * 2
    assert (await later).choices[0].text == "here"
    await heir.stop()


async def test_executors_are_changed_through_the_gateway(stack: Stack) -> None:
    def change() -> tuple[list[str], list[str]]:
        with Client(stack.engine.settings.listen) as client:
            added = [executor.target for executor in client.change_executor("add", "somewhere:1")]
            with pytest.raises(ClientError) as absent:
                client.change_executor("drain", "nowhere:1")
            assert (absent.value.code, absent.value.reason) == (grpc.StatusCode.NOT_FOUND, "NOT_FOUND")
            with pytest.raises(ClientError) as unnamed:
                client.change_executor("remove", "")
            assert unnamed.value.reason == "INVALID_FIELD"
            return added, [executor.target for executor in client.executors()]

    assert await asyncio.to_thread(change) == (["somewhere:1"], [])
    (request,) = stack.scheduler.executor_changes[:1]
    assert request == scheduler_pb2.ManageExecutorRequest(
        action=scheduler_pb2.EXECUTOR_ACTION_ADD, target="somewhere:1"
    )
