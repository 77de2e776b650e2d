"""Structured output through the four services: what rules say holds, and what is generated depends on nothing else.

A random model, for which only the masks make sense of its output; each request alone without drafts, then all together
with drafts in a pool too small for them, then while the executor is killed.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from quire.v1 import gateway_pb2, gateway_pb2_grpc, types_pb2
from tests.e2e.requests import Answer, all_blocks_back, at_once, channel, collect, greedy, status
from tests.e2e.stack import Stack
from tests.fixtures.models import make_rand_model

TOKENS = 96
STOP, LENGTH = types_pb2.FINISH_REASON_STOP, types_pb2.FINISH_REASON_LENGTH
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
TAG = {
    "type": "structural_tag",
    "triggers": ["a"],
    "structures": [{"begin": "a=", "schema": {"type": "boolean"}, "end": ";"}],
}
NESTED = 'root ::= "(" root ")" | "[" root "]" | number\nnumber ::= [0-9]{1,3}\n'


def is_person(text: str) -> bool:
    value = json.loads(text)
    return (
        list(value) == ["name", "age", "tags"]
        and len(value["name"]) <= 8
        and type(value["age"]) is int
        and 0 <= value["age"] <= 150
        and set(value["tags"]) <= {"red", "green"}
        and len(value["tags"]) <= 2
    )


def is_nested(text: str) -> bool:
    while inner := re.fullmatch(r"\((.*)\)|\[(.*)\]", text):
        text = inner[1] or inner[2] or ""
    return re.fullmatch(r"[0-9]{1,3}", text) is not None


@dataclass(frozen=True)
class Rule:
    constraint: types_pb2.Constraint
    holds: Callable[[str], bool]  # for an output that ended by itself


RULES = (
    Rule(types_pb2.Constraint(json_schema=json.dumps(PERSON)), is_person),
    Rule(
        types_pb2.Constraint(regex="[a-e]{3,5}(-[x-z]{2}){1,4}"),
        lambda text: bool(re.fullmatch("[a-e]{3,5}(-[x-z]{2}){1,4}", text)),
    ),
    Rule(
        types_pb2.Constraint(choice=types_pb2.ChoiceList(values=["green", "greener", "blué"])),
        {"green", "greener", "blué"}.__contains__,
    ),
    Rule(types_pb2.Constraint(grammar=NESTED), is_nested),
    Rule(types_pb2.Constraint(json_object=True), lambda text: isinstance(json.loads(text), dict)),
    Rule(
        types_pb2.Constraint(structural_tag=json.dumps(TAG)),
        lambda text: not re.search("a(?!=)|a=(?!true;|false;)", text),
    ),
)


def guided() -> list[tuple[Rule, gateway_pb2.GenerationInput]]:
    """Greedy and drawn requests of each rule, some with two choices."""
    made = []
    for number, rule in enumerate(RULES):
        for variant, sampling in enumerate(
            ({"temperature": 0.0}, {"temperature": 1.0, "seed": 5}, {"temperature": 1.6, "seed": 9})
        ):
            request = greedy([number, variant, *range(40, 60)], TOKENS, choice_count=1 + (variant == 1))
            request.sampling.CopyFrom(types_pb2.SamplingParams(**sampling))
            request.stop.ignore_eos = False
            request.constraint.CopyFrom(rule.constraint)
            made.append((rule, request))
    for request in (made[1][1], made[4][1]):  # the grammar's end wins
        request.stop.min_tokens = TOKENS
    made[2][1].stop.ignore_eos = True
    made[5][1].logprobs.output_count = 2
    return made


async def answers_to(target: str, requests: list[gateway_pb2.GenerationInput]) -> list[list[Answer]]:
    async with channel(target) as wire:
        stub = gateway_pb2_grpc.InferenceServiceStub(wire)
        return await asyncio.gather(*(collect(stub, request) for request in requests))


async def one_by_one(target: str, requests: list[gateway_pb2.GenerationInput]) -> list[list[Answer]]:
    """Without drafts."""
    found = []
    for request in requests:
        plain = gateway_pb2.GenerationInput()
        plain.CopyFrom(request)
        plain.speculation = "off"
        found += await answers_to(target, [plain])
    return found


def said(answers: list[list[Answer]]) -> list[list[tuple[list[int], str, int]]]:
    return [[(one.ids, one.text, one.finish) for one in choices] for choices in answers]


@pytest.mark.parametrize("backend", ["cpu", "torch"])
async def test_rules_hold_whatever_goes_on_beside(backend: str, tmp_path: Path) -> None:
    """O2, E1, E3, G5: also with drafts, preemption, two choices, and on an executor that takes over."""
    model = make_rand_model(tmp_path, seed=31)
    pairs = guided()
    free = greedy([7] * 30, TOKENS)
    requests = [request for _, request in pairs] + [free]
    executor: dict[str, Any] = {"backend": backend, "draft": "ngram"}
    async with Stack(model, kv_blocks=14, executor=executor, scheduler={"lookahead_tokens": 8}) as stack:
        calm = await one_by_one(stack.gateway, requests)
        ended = 0
        for (rule, request), choices in zip(pairs, calm, strict=False):
            for answer in choices:
                assert answer.finish in (STOP, LENGTH)
                if answer.finish == STOP:
                    ended += 1
                    assert rule.holds(answer.text), (request.constraint, answer.text)
                else:
                    assert len(answer.ids) == TOKENS
        assert ended > len(pairs) // 2, "too few of the outputs ended by themselves to say anything"
        together = await at_once(stack, len(requests), answers_to(stack.gateway, requests))
        assert said(together) == said(calm)
        assert (await status(stack.gateway)).scheduler.preemption_count > 0, "nothing was preempted"
        if backend == "cpu":
            running = asyncio.create_task(answers_to(stack.gateway, requests))
            while not (await status(stack.gateway)).scheduler.running_count:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            await asyncio.to_thread(stack.kill, "executor")
            await asyncio.to_thread(stack.start, "executor")
            assert said(await running) == said(calm)
        await all_blocks_back(stack.gateway)
