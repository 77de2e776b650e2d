"""32 concurrent streams with random cancels: no error, no leaked block, flat memory."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from pathlib import Path

import grpc
import psutil
import pytest

from quire.v1 import gateway_pb2, gateway_pb2_grpc
from tests.e2e.requests import all_blocks_back, channel, collect, greedy, ids_of, leased_blocks, seeded
from tests.e2e.stack import Stack
from tests.fixtures.models import make_rand_model

GROWTH_BYTES = 40 << 20  # what allocators and caches may still take after the first quarter


async def one_client(target: str, number: int, until: float) -> tuple[int, int]:
    """Sends requests until the time is over and cuts a third of them; returns (finished, cancelled)."""
    draw = random.Random(number)
    finished = cancelled = 0
    async with channel(target) as wire:
        stub = gateway_pb2_grpc.InferenceServiceStub(wire)
        while time.monotonic() < until:
            shared = [7] * draw.choice((0, 40, 70))
            prompt = shared + [draw.randrange(256) for _ in range(draw.randrange(1, 60))]
            tokens = draw.randrange(1, 64)
            request = seeded(prompt, tokens, number, choice_count=draw.choice((1, 1, 2)))
            if draw.random() < 0.33:
                call = stub.GenerateStream(gateway_pb2.GenerateStreamRequest(input=request))
                with contextlib.suppress(asyncio.CancelledError, grpc.aio.UsageError):
                    for _ in range(draw.randrange(0, 6)):
                        if await call.read() is grpc.aio.EOF:
                            break
                call.cancel()
                cancelled += 1
                continue
            for answer in await collect(stub, request):
                assert len(answer.ids) == tokens
            finished += 1
    return finished, cancelled


async def soak(model: Path, seconds: float) -> None:
    async with Stack(model, kv_blocks=96) as stack:
        names = list(stack.services)
        probe = greedy([5, 6, 7], 12)
        before = await ids_of(stack.gateway, [probe])

        def resident() -> dict[str, int]:
            return {name: psutil.Process(stack.pid(name)).memory_info().rss for name in names}

        async def run(share: float) -> list[tuple[int, int]]:
            until = time.monotonic() + seconds * share
            return await asyncio.gather(*(one_client(stack.gateway, n, until) for n in range(32)))

        first = await run(0.25)
        settled = resident()
        second = await run(0.75)
        await all_blocks_back(stack.gateway)
        grown = {name: size - settled[name] for name, size in resident().items()}
        assert all(size < GROWTH_BYTES for size in grown.values()), grown
        assert sum(done for done, _ in first + second) > 32
        assert sum(cut for _, cut in first + second) > 16
        assert await ids_of(stack.gateway, [probe]) == before
        assert await leased_blocks(stack.gateway) == 0


@pytest.mark.timeout(180)
async def test_a_minute_of_streams_and_cancels(tmp_path: Path) -> None:
    """Cases D2 and F6, in short."""
    await soak(make_rand_model(tmp_path, seed=3), 60)


@pytest.mark.full
@pytest.mark.timeout(900)
async def test_ten_minutes_of_streams_and_cancels(tmp_path: Path) -> None:
    await soak(make_rand_model(tmp_path, seed=3), 600)
