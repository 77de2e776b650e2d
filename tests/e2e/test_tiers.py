"""KV below the device, with the real services: what memory had no room for comes back from disk, and the same."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.v1 import gateway_pb2_grpc
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
