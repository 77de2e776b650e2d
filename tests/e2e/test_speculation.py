"""Speculation through the four services: what is generated is what plain decoding generates, whoever drafts how far.

Requests with every limit decode beside each other, in chunks, with several choices, in a pool too small for them, and
once more on warm prefixes; each is compared with itself on a stack that has no drafts.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from quire.v1 import gateway_pb2, gateway_pb2_grpc
from tests.e2e.requests import all_blocks_back, at_once, channel, collect, greedy, seeded, status
from tests.e2e.stack import Stack
from tests.e2e.test_exactness import TEXTS
from tests.fixtures.models import make_rand_model

LIMITS = ("auto", "1", "4", "off", "2", "16", "8")
"""Of requests in turn, so that neighbours have others; `auto` changes its own."""
BLOCK = 32

Outputs = list[list[list[int]]]
"""Ids by request and choice."""


@dataclass(frozen=True)
class Case:
    model: Path | str
    requests: list[gateway_pb2.GenerationInput]
    tokens: int  # of each output
    plain: Outputs
    longest: int  # the request with the longest prompt


async def outputs(target: str, requests: Sequence[gateway_pb2.GenerationInput]) -> Outputs:
    """Of requests sent together."""
    async with channel(target) as wire:
        stub = gateway_pb2_grpc.InferenceServiceStub(wire)
        answers = await asyncio.gather(*(collect(stub, request) for request in requests))
    return [[choice.ids for choice in answer] for answer in answers]


def asked(prompts: Sequence[Sequence[int] | str], tokens: int) -> list[gateway_pb2.GenerationInput]:
    """Greedy and seeded requests, every fifth with two choices, with penalties in some."""
    made = []
    for number, prompt in enumerate(prompts):
        request = seeded(prompt, tokens, 50 + number) if number % 2 else greedy(prompt, tokens)
        if number % 5 == 1:
            request.choice_count = 2
        if number % 7 == 3:
            request.sampling.frequency_penalty = 0.6
        made.append(request)
    return made


def with_limits(requests: Sequence[gateway_pb2.GenerationInput], first: int) -> list[gateway_pb2.GenerationInput]:
    """The same requests, each with a limit; `first` turns the order."""
    made = []
    for number, request in enumerate(requests):
        limited = gateway_pb2.GenerationInput()
        limited.CopyFrom(request)
        limited.speculation = LIMITS[(number + first) % len(LIMITS)]
        made.append(limited)
    return made


def sequences(requests: Sequence[gateway_pb2.GenerationInput]) -> int:
    return sum(max(1, request.choice_count) for request in requests)


async def check(case: Case, draft: str, longest: int, least_accepted: int) -> None:
    """All at once, twice with other limits, in a pool for two and a half of them; then one on a known prefix."""
    blocks = int(2.5 * -(-(longest + case.tokens) // BLOCK))
    scheduler = {"step_tokens": 48, "lookahead_tokens": 8}
    async with Stack(case.model, kv_blocks=blocks, executor={"draft": draft}, scheduler=scheduler) as stack:
        count = sequences(case.requests)

        def all_of(first: int) -> Coroutine[Any, Any, Outputs]:
            return outputs(stack.gateway, with_limits(case.requests, first))

        assert await at_once(stack, count, all_of(0)) == case.plain
        assert await all_of(3) == case.plain, "once more"
        assert (await status(stack.gateway)).scheduler.preemption_count > 0, "nothing was preempted"
        alone = slice(case.longest, case.longest + 1)
        for limit in range(len(LIMITS)):
            assert await outputs(stack.gateway, with_limits(case.requests[alone], limit)) == case.plain[alone]
        known = (await status(stack.gateway)).scheduler
        assert known.kv.prefix_hit_tokens > 0, "no prefix was reused"
        drafts = known.executors[0].speculation
        assert sum(drafts.steps_by_limit[1:]) == drafts.step_count
        assert least_accepted <= drafts.accepted_count <= drafts.proposed_count
        await all_blocks_back(stack.gateway)


async def case_of(model: Path | str, prompts: Sequence[Sequence[int] | str], tokens: int) -> Case:
    requests = asked(prompts, tokens)
    async with Stack(model) as stack:
        longest = max(range(len(prompts)), key=lambda number: len(prompts[number]))
        return Case(model, requests, tokens, await outputs(stack.gateway, requests), longest)


# How much is proposed depends on the machine's speed, and random weights seldom agree or repeat themselves.
@pytest.mark.parametrize(("draft", "least_accepted"), [("ngram", 0), ("early-exit:1", 1), ("model", 0)])
async def test_small_model_says_what_it_says_without_drafts(draft: str, least_accepted: int, tmp_path: Path) -> None:
    draw = random.Random(7)
    words = [[draw.randrange(256) for _ in range(length)] for length in (3, 9, 20, 31)]
    prompts = [words[n % 4] * (1 + n % 3) + [n] for n in range(8)]
    model = make_rand_model(tmp_path / "target", seed=11)
    if draft == "model":  # the target's shape and other weights: now and then right
        draft = str(make_rand_model(tmp_path / "draft", seed=12))
    await check(await case_of(model, prompts, 48), draft, max(map(len, prompts)), least_accepted)


REAL_PROMPTS = [*TEXTS, *(TEXTS[n % 20] + " " + TEXTS[(7 * n + 3) % 20] for n in range(30))]


@pytest.fixture(scope="module")
def real() -> Case:
    """SmolLM2, 50 prompts x 128 tokens."""
    return asyncio.run(case_of("smollm2", REAL_PROMPTS, 128))


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("draft", ["ngram", "early-exit:8", "smollm2"])
async def test_real_model_says_what_it_says_without_drafts(draft: str, real: Case) -> None:
    await check(real, draft, 512, least_accepted=1)
