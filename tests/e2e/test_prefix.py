"""Reused KV: under pressure and cancels no answer holds another's tokens, and keys mean the same in every process."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from quire.v1 import gateway_pb2, gateway_pb2_grpc
from tests.e2e.requests import all_blocks_back, channel, collect, greedy, ids_of, status
from tests.e2e.stack import Stack
from tests.fixtures.models import make_rand_model, reference_generate

CLIENTS = 50
SHARED = [(3 * n * n + 7) % 256 for n in range(70)]  # two full blocks and a part


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_rand_model(tmp_path_factory.mktemp("rand"), seed=51)


@pytest.fixture(scope="module")
def small(model: Path) -> Iterator[Stack]:
    with Stack(model, kv_blocks=14) as stack:
        yield stack


async def test_no_answer_holds_tokens_of_another(model: Path, small: Stack) -> None:
    """Case F6: a shared prefix, distinct tails, random cancels and a pool that holds few of them."""
    draw = random.Random(6)
    tails = [[draw.randrange(256) for _ in range(draw.randrange(1, 40))] for _ in range(CLIENTS)]
    lengths = [draw.randrange(4, 14) for _ in tails]
    truth = [reference_generate(model, SHARED + tail, n) for tail, n in zip(tails, lengths, strict=True)]

    async def client(number: int) -> None:
        own = random.Random(number)
        async with channel(small.gateway) as wire:
            stub = gateway_pb2_grpc.InferenceServiceStub(wire)
            for _ in range(own.randrange(1, 4)):
                request = greedy(SHARED[: own.choice((0, 40, 70))] + tails[number], 60)
                call = stub.GenerateStream(gateway_pb2.GenerateStreamRequest(input=request))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(own.uniform(0.0, 0.3)):
                        await call.read()
                call.cancel()
                [answer] = await collect(stub, greedy(SHARED + tails[number], lengths[number]))
                assert answer.ids == truth[number], number

    await asyncio.gather(*map(client, range(CLIENTS)))
    await all_blocks_back(small.gateway)
    assert (await status(small.gateway)).scheduler.kv.prefix_hit_tokens > 0, "no prefix was reused"


async def test_choices_share_their_prompt(model: Path, small: Stack) -> None:
    """Case F6: more choices than the pool holds, each as if it ran alone; what never fits is refused."""
    truth = reference_generate(model, SHARED, 40)
    async with channel(small.gateway) as wire:
        answers = await collect(gateway_pb2_grpc.InferenceServiceStub(wire), greedy(SHARED, 40, choice_count=12))
    assert [answer.ids for answer in answers] == [truth] * 12
    assert answers[0].usage is not None
    assert answers[0].usage.prompt_tokens == len(SHARED)
    await all_blocks_back(small.gateway)
    with pytest.raises(grpc.aio.AioRpcError) as never:
        await ids_of(small.gateway, [greedy([1] * 385, 600)])  # 31 blocks: the context is what there is memory for
    assert never.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def cached_tokens(target: str, prompt: list[int]) -> tuple[list[int], int]:
    async with channel(target) as wire:
        [answer] = await collect(gateway_pb2_grpc.InferenceServiceStub(wire), greedy(prompt, 4))
    assert answer.usage is not None
    return answer.ids, answer.usage.cached_tokens


async def test_keys_outlive_the_processes_that_made_them(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case F7: each process hashes strings in its own way, and every one finds what another computed."""
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    async with Stack(model) as stack:
        prompt = [*SHARED, 1, 2, 3]
        cold, none = await cached_tokens(stack.gateway, prompt)
        assert none == 0
        assert await cached_tokens(stack.gateway, prompt) == (cold, 64)
        for seed, name in enumerate(("kvmanager", "scheduler"), start=2):
            monkeypatch.setenv("PYTHONHASHSEED", str(seed))
            stack.kill(name)
            stack.start(name)
            await asyncio.to_thread(stack.wait_ready)
            assert await cached_tokens(stack.gateway, prompt) == (cold, 64), f"after a restart of the {name}"
        stack.kill("executor")  # and the KV with it
        stack.start("executor")
        await asyncio.to_thread(stack.wait_ready)
        assert await cached_tokens(stack.gateway, prompt) == (cold, 0)
        assert await cached_tokens(stack.gateway, prompt) == (cold, 64)
