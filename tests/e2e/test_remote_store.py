"""KV shared through Redis: what one executor computed, another finds."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from quire.v1 import gateway_pb2_grpc
from tests.e2e.requests import all_blocks_back, channel, collect, greedy
from tests.e2e.stack import HOST, Stack, free_port
from tests.fixtures.models import make_rand_model, reference_generate

BLOCK = 32
PROMPTS = [[(11 * n * n + 17 * number + n) % 256 for n in range(3 * BLOCK + 5)] for number in range(16)]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[str]:
    """The URL of a Redis server of this test's own."""
    server = shutil.which("redis-server")
    if server is None:
        pytest.skip("needs redis-server")
    port = free_port()
    arguments = [server, "--port", str(port), "--bind", HOST, "--save", "", "--dir", str(tmp_path)]
    process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL)
    try:
        yield f"redis://{HOST}:{port}/0"
    finally:
        process.terminate()
        process.wait(10)


async def test_what_one_executor_computed_another_finds(tmp_path: Path, store: str) -> None:
    model = make_rand_model(tmp_path / "model", seed=91)
    truth = [reference_generate(model, prompt, 4) for prompt in PROMPTS]

    async def ask(stack: Stack) -> list[tuple[list[int], int]]:
        answers = []
        async with channel(stack.gateway) as wire:
            for prompt in PROMPTS:
                [answer] = await collect(gateway_pb2_grpc.InferenceServiceStub(wire), greedy(prompt, 4))
                assert answer.usage is not None
                answers.append((answer.ids, answer.usage.cached_tokens))
        return answers

    async with Stack(model, kv_blocks=32, executor={"kv_remote": store}) as stack:
        assert [ids for ids, _ in await ask(stack)] == truth
        with redis.Redis.from_url(store) as client:
            assert client.dbsize() >= 16, "little was exported"
        stack.kill("executor")  # its memory is gone; what the kvmanager knows of the store is not
        stack.start("executor")
        await asyncio.to_thread(stack.wait_ready)
        found = await ask(stack)
        assert [ids for ids, _ in found] == truth
        assert sum(cached > 0 for _, cached in found) >= 4
        await all_blocks_back(stack.gateway)
        with redis.Redis.from_url(store) as client:
            client.flushall()  # losing it costs time alone
        assert [ids for ids, _ in await ask(stack)] == truth
        await all_blocks_back(stack.gateway)
