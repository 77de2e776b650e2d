"""Case E1 in full: sequences that lost their blocks again and again answer as if nothing had happened.

Tokens, text, log probabilities, where and why they end and what they count are those of each request alone; with and
without a lower tier to which their KV goes meanwhile.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from quire.v1 import gateway_pb2, gateway_pb2_grpc, types_pb2
from tests.e2e.requests import all_blocks_back, at_once, channel, greedy, status
from tests.e2e.stack import Stack
from tests.fixtures.models import make_rand_model

BLOCK, TOKENS = 32, 90
LONGEST = -(-(20 + TOKENS) // BLOCK)
POOL = int(2.5 * LONGEST)


@dataclass
class Heard:
    """All that a client hears of one choice."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    scores: list[tuple[int, float, tuple[int, ...]]] = field(default_factory=list)  # token, log probability, likeliest
    prompt_scores: list[tuple[int, float]] = field(default_factory=list)
    finish: int = types_pb2.FINISH_REASON_UNSPECIFIED
    matched_stop: str = ""
    counts: tuple[int, int] = (0, 0)  # tokens of the prompt and of the output


def rules() -> list[dict[str, Any]]:
    """Fields of sampling and stop, each a request's."""
    return [
        {"temperature": 0},
        {"temperature": 1.0, "seed": 5, "top_p": 0.95},
        {"temperature": 0.8, "seed": 6, "top_k": 40, "min_p": 0.01},
        {"temperature": 0, "repetition_penalty": 1.3},
        {"temperature": 1.0, "seed": 7, "presence_penalty": 0.7, "frequency_penalty": 0.4},
        {"temperature": 0, "frequency_penalty": 1.1, "logit_bias": {65: 4.0, 66: -100.0}},
    ]


def requests() -> list[gateway_pb2.GenerationInput]:
    """Three of each rule: one that runs to its length, one with stop strings, one with stop tokens after a while."""
    draw = random.Random(4)
    made = []
    for rule in rules():
        plain, strung, stopped = (greedy([draw.randrange(256) for _ in range(20)], TOKENS) for _ in range(3))
        for request in (plain, strung, stopped):
            request.sampling.CopyFrom(types_pb2.SamplingParams(**rule))
        plain.logprobs.output_count = 3
        plain.logprobs.prompt_count = 1
        strung.stop.stop.extend(["Q", "x", "7"])
        stopped.stop.stop_token_ids.extend(range(0, 256, 4))
        stopped.stop.min_tokens = 60
        made += [plain, strung, stopped]
    return made


async def hear(stub: gateway_pb2_grpc.InferenceServiceAsyncStub, request: gateway_pb2.GenerationInput) -> Heard:
    heard = Heard()
    async for message in stub.GenerateStream(gateway_pb2.GenerateStreamRequest(input=request)):
        heard.ids += message.token_ids
        heard.text += message.text
        heard.scores += [(s.token_id, s.logprob, tuple(top.token_id for top in s.top)) for s in message.logprobs]
        heard.prompt_scores += [(s.token_id, s.logprob) for s in message.prompt_logprobs]
        heard.finish = message.finish_reason or heard.finish
        heard.matched_stop = message.matched_stop or heard.matched_stop
        if message.HasField("usage"):
            heard.counts = (message.usage.prompt_tokens, message.usage.completion_tokens)
    return heard


@pytest.mark.parametrize("has_disk", [False, True])
async def test_answers_are_the_same_through_heavy_preemption(tmp_path: Path, has_disk: bool) -> None:
    model = make_rand_model(tmp_path / "model", seed=23)
    disk = {"kv_disk": tmp_path / "disk", "kv_disk_size": "64MiB"} if has_disk else {}
    wanted = requests()
    async with (
        Stack(model, kv_blocks=POOL, executor=disk, scheduler={"lookahead_tokens": 8}) as stack,
        channel(stack.gateway) as wire,
    ):
        stub = gateway_pb2_grpc.InferenceServiceStub(wire)

        async def together() -> list[Heard]:
            return await asyncio.gather(*(hear(stub, request) for request in wanted))

        crowd = await at_once(stack, len(wanted), together())
        preemptions = (await status(stack.gateway)).scheduler.preemption_count
        await all_blocks_back(stack.gateway)
        alone = [await hear(stub, request) for request in wanted]
        assert preemptions > len(wanted) // 4
        assert (await status(stack.gateway)).scheduler.preemption_count == preemptions, "it was not alone"
        await all_blocks_back(stack.gateway)
        below = (await status(stack.gateway)).scheduler.kv.pools[1:]
    for lone, one in zip(alone, crowd, strict=True):
        assert one == lone
    assert all(len(heard.scores) == heard.counts[1] == TOKENS for heard in crowd[::3])
    assert any(heard.matched_stop for heard in crowd[1::3]), "no stop string matched"
    assert all(60 <= heard.counts[1] < TOKENS for heard in crowd[2::3])
    assert [pool.cached_count > 0 for pool in below] == [True] * has_disk
