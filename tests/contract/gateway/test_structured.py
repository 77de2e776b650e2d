"""Rules of outputs at the gateway: they travel with their requests, and bad ones go nowhere."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import grpc
import pytest

from quire.v1 import gateway_pb2, types_pb2
from quire.v1.types_pb2 import ChoiceList, Constraint
from services.common.errors import QuireError, Reason
from services.gateway.rules import MOST_WAITING, RuleChecker
from tests.contract.gateway.conftest import Stack
from tests.contract.gateway.fake_scheduler import STOP
from tests.fixtures.vocabularies import EOS_ID

WIDE = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1500)}}


def asked(rule: Constraint, **fields: Any) -> gateway_pb2.GenerateStreamRequest:
    return gateway_pb2.GenerateStreamRequest(input=gateway_pb2.GenerationInput(text="hi", constraint=rule, **fields))


@pytest.mark.parametrize(
    "rule",
    [
        Constraint(json_schema='{"type": "integer"}'),
        Constraint(regex="a+"),
        Constraint(choice=ChoiceList(values=["a", "b"])),
        Constraint(grammar='root ::= "a"'),
        Constraint(grammar='start: <|im_end|> "a"'),  # one of the model's special tokens
        Constraint(json_object=True),
    ],
)
async def test_a_rule_goes_with_its_request(stack: Stack, rule: Constraint) -> None:
    call = stack.inference.GenerateStream(asked(rule, choice_count=2))
    submit = await stack.scheduler.heard(stack.scheduler.submits)
    assert (submit.constraint, submit.choice_count) == (rule, 2)
    await stack.scheduler.started(submit)
    for choice in range(2):
        await stack.scheduler.tokens(submit, [ord("a"), EOS_ID], choice=choice, end=STOP)
    assert "".join([message.text async for message in call]) == "aa"


@pytest.mark.parametrize(
    ("rule", "field"),
    [
        (Constraint(), "constraint"),
        (Constraint(regex="[a"), "constraint.regex"),
        (Constraint(regex="a" * 10**6), "constraint.regex"),
        (Constraint(json_schema="{"), "constraint.json_schema"),
        (Constraint(json_schema='{"not": {}}'), "constraint.json_schema"),
        (Constraint(json_schema='{"type": "integer", "multipleOf": 999999937}'), "constraint.json_schema"),
        (Constraint(grammar="root ::= x"), "constraint.grammar"),
        (Constraint(grammar="start: <|no such token|>"), "constraint.grammar"),
        (Constraint(structural_tag="{}"), "constraint.structural_tag"),
    ],
)
async def test_o1_a_bad_rule_is_refused_before_anything_is_submitted(
    stack: Stack, rule: Constraint, field: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stack.inference.Generate(gateway_pb2.GenerateRequest(input=asked(rule).input))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert (caught.value.details() or "").startswith(f"{field}:")
    assert not stack.scheduler.submits
    assert len(stack.engine._table) == 0


async def test_o1_valid_and_invalid_rules_in_turn(stack: Stack) -> None:
    """What passed once passes again, and what did not does not."""
    for _ in range(3):
        with pytest.raises(grpc.aio.AioRpcError):
            await stack.inference.Generate(gateway_pb2.GenerateRequest(input=asked(Constraint(regex="a**(")).input))
        call = stack.inference.GenerateStream(asked(Constraint(regex="a")))
        submit = await stack.scheduler.heard(stack.scheduler.submits)
        stack.scheduler.submits.clear()
        await stack.scheduler.started(submit)
        await stack.scheduler.tokens(submit, [ord("a"), EOS_ID], end=STOP)
        assert "".join([message.text async for message in call]) == "a"


async def test_beam_search_has_no_rules(stack: Stack) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stack.inference.Generate(
            gateway_pb2.GenerateRequest(
                input=asked(Constraint(regex="a"), beam_width=2, sampling=types_pb2.SamplingParams(temperature=0)).input
            )
        )
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
    assert (caught.value.details() or "").startswith("constraint:")


async def test_checking_runs_beside_the_loop_and_its_queue_is_bounded() -> None:
    checker = RuleChecker()
    try:
        schemas = [Constraint(json_schema=json.dumps(WIDE | {"title": str(i)})) for i in range(MOST_WAITING + 1)]
        first = asyncio.create_task(checker.check(schemas[0], frozenset()))
        turns = 0
        while not first.done():
            turns += 1
            await asyncio.sleep(0.001)
        assert turns > 3
        started = time.thread_time()
        await checker.check(schemas[0], frozenset())
        assert time.thread_time() - started < 0.01
        waiting = [asyncio.create_task(checker.check(rule, frozenset())) for rule in schemas[1:]]
        await asyncio.sleep(0)
        with pytest.raises(QuireError) as caught:
            await checker.check(Constraint(regex="a"), frozenset())
        assert caught.value.reason is Reason.QUEUE_FULL
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)
    finally:
        checker.stop()
