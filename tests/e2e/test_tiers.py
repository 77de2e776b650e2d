"""KV below the device, with the real services: what memory had no room for comes back from disk, and the same."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from quire.v1 import gateway_pb2, gateway_pb2_grpc
from tests.e2e.requests import all_blocks_back, channel, collect, greedy
from tests.e2e.stack import Stack
from tests.fixtures.models import make_rand_model, reference_generate

BLOCK = 32
PROMPTS = [[(7 * n * n + 13 * number + n) % 256 for n in range(3 * BLOCK + 5)] for number in range(48)]
"""Three full blocks each: together almost twice what the device holds."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_rand_model(tmp_path_factory.mktemp("rand"), seed=61)


@pytest.fixture(scope="module")
def stack(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    disk = tmp_path_factory.mktemp("disk")
    with Stack(model, kv_blocks=80, executor={"kv_disk": disk, "kv_disk_size": "64MiB"}) as made:
        yield made


async def ask(stack: Stack, prompt: list[int]) -> tuple[list[int], int]:
    """Four tokens, and how many tokens of the prompt had KV."""
    async with channel(stack.gateway) as wire:
        [answer] = await collect(gateway_pb2_grpc.InferenceServiceStub(wire), greedy(prompt, 4))
    assert answer.usage is not None
    return answer.ids, answer.usage.cached_tokens


async def test_prefixes_outlive_memory_and_the_process(model: Path, stack: Stack) -> None:
    truth = [reference_generate(model, prompt, 4) for prompt in PROMPTS]
    for prompt, expected in zip(PROMPTS, truth, strict=True):
        assert await ask(stack, prompt) == (expected, 0)
    found = [await ask(stack, prompt) for prompt in PROMPTS]
    assert [ids for ids, _ in found] == truth
    assert sum(cached == 3 * BLOCK for _, cached in found) >= len(PROMPTS) * 3 // 4  # memory alone held 26 of them
    await all_blocks_back(stack.gateway)

    stack.kill("executor")
    stack.start("executor")
    await asyncio.to_thread(stack.wait_ready)
    found = [await ask(stack, prompt) for prompt in PROMPTS]
    assert [ids for ids, _ in found] == truth
    assert sum(cached > 0 for _, cached in found) >= len(PROMPTS) // 3  # those that had moved down
    await all_blocks_back(stack.gateway)


async def test_cancels_and_a_death_while_blocks_come_up(model: Path, stack: Stack) -> None:
    """Case D2: clients leave while their prefixes are loaded, and in the end the executor dies; nothing stays held."""
    draw = random.Random(2)

    async def leave(prompt: list[int], seconds: float) -> None:
        async with channel(stack.gateway) as wire:
            stub = gateway_pb2_grpc.InferenceServiceStub(wire)
            call = stub.GenerateStream(gateway_pb2.GenerateStreamRequest(input=greedy(prompt, 60)))
            with contextlib.suppress(TimeoutError, grpc.aio.AioRpcError):
                async with asyncio.timeout(seconds):
                    await call.read()
            call.cancel()

    async def crowd() -> None:
        await asyncio.gather(*(leave(draw.choice(PROMPTS), draw.uniform(0, 0.2)) for _ in range(20)))

    for _ in range(4):
        await crowd()
    await all_blocks_back(stack.gateway)
    crowding = asyncio.create_task(crowd())
    await asyncio.sleep(0.05)
    stack.kill("executor")
    await crowding
    stack.start("executor")
    await asyncio.to_thread(stack.wait_ready)
    chosen = draw.sample(PROMPTS, 12)
    truth = [reference_generate(model, prompt, 4) for prompt in chosen]
    assert [ids for ids, _ in [await ask(stack, prompt) for prompt in chosen]] == truth
    await all_blocks_back(stack.gateway)
