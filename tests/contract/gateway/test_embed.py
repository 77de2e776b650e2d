"""Vectors over gRPC against a scripted scheduler."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from quire.v1 import gateway_pb2, scheduler_pb2, types_pb2
from services.common.errors import Reason
from tests.contract.gateway.conftest import Stack, eventually
from tests.contract.gateway.fake_scheduler import STOP
from tests.contract.gateway.test_generate import reason_of
from tests.fixtures.vocabularies import BOS_ID

VALUES = [0.5, -0.5, 0.5, 0.5]


async def embed(stack: Stack, **fields: Any) -> tuple[asyncio.Future[gateway_pb2.EmbedResponse], scheduler_pb2.Submit]:
    """A call, and what the scheduler heard of it."""
    known = len(stack.scheduler.submits)
    call = asyncio.ensure_future(stack.inference.Embed(gateway_pb2.EmbedRequest(**fields)))
    await eventually(lambda: call.done() or len(stack.scheduler.submits) > known)
    if call.done():
        call.result()
    return call, stack.scheduler.submits[-1]


async def test_a_text_becomes_a_vector(stack: Stack) -> None:
    call, submit = await embed(stack, text="hi", request_id="r-1", priority=3)
    assert list(submit.prompt_token_ids) == [BOS_ID, *b"hi"]
    assert (submit.pooling, submit.priority, submit.choice_count) == (types_pb2.POOLING_LAST, 3, 1)
    await stack.scheduler.started(submit)
    await stack.scheduler.vector(submit, VALUES)
    answer = await call
    assert (answer.request_id, answer.model, list(answer.values)) == ("r-1", "m", VALUES)
    assert answer.usage == types_pb2.Usage(prompt_tokens=3)
    assert len(stack.engine._table) == 0


async def test_token_ids_and_the_mean(stack: Stack) -> None:
    call, submit = await embed(stack, token_ids={"ids": [5, 6]}, pooling=types_pb2.POOLING_MEAN)
    assert list(submit.prompt_token_ids) == [5, 6]
    assert submit.pooling == types_pb2.POOLING_MEAN
    await stack.scheduler.fail(submit, Reason.NOT_FINITE)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert reason_of(caught.value) == "NOT_FINITE"


async def test_an_end_without_a_vector_is_an_error(stack: Stack) -> None:
    call, submit = await embed(stack, text="hi")
    await stack.scheduler.started(submit)
    await stack.scheduler.say(ended=[scheduler_pb2.ChoiceEnd(handle=submit.handle, reason=STOP)])
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert reason_of(caught.value) == "PROTOCOL"


async def test_a_lost_scheduler_is_asked_again(stack: Stack) -> None:
    call, submit = await embed(stack, text="hi", request_id="r-1")
    await stack.scheduler.started(submit)
    await stack.scheduler.stop()
    await stack.scheduler.start()
    again = await stack.scheduler.heard(stack.scheduler.submits, 2)
    assert (again.pooling, again.request_id) == (types_pb2.POOLING_LAST, "r-1")
    await stack.scheduler.started(again)
    await stack.scheduler.vector(again, VALUES)
    assert list((await call).values) == VALUES


async def test_a_client_that_goes_ends_the_request(stack: Stack) -> None:
    call, submit = await embed(stack, text="hi")
    call.cancel()
    assert await stack.scheduler.heard(stack.scheduler.cancels) == submit.handle


@pytest.mark.parametrize(
    ("fields", "reason", "field"),
    [
        ({}, "INVALID_FIELD", "prompt"),
        ({"token_ids": {"ids": []}}, "INVALID_FIELD", "token_ids"),
        ({"token_ids": {"ids": [10**6]}}, "INVALID_FIELD", "token_ids"),
        ({"token_ids": {"ids": [5] * 512}}, "CONTEXT_EXCEEDED", "prompt"),
        ({"text": "hi", "pooling": 9}, "INVALID_FIELD", "pooling"),
        ({"text": "hi", "priority": 101}, "INVALID_FIELD", "priority"),
        ({"text": "hi", "request_id": "é"}, "INVALID_FIELD", "request_id"),
        ({"text": "hi", "model": "other"}, "MODEL_NOT_FOUND", "model"),
    ],
)
async def test_bad_fields_are_named(stack: Stack, fields: dict[str, Any], reason: str, field: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match=field) as caught:
        await stack.inference.Embed(gateway_pb2.EmbedRequest(**fields))
    assert reason_of(caught.value) == reason
    assert not stack.scheduler.submits
