"""A kvmanager killed under load and started again: streams run on, the cache survives, every block is accounted for."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from quire.v1 import gateway_pb2, gateway_pb2_grpc
from tests.e2e.requests import Ids, all_blocks_back, channel, collect, greedy, ids_of, leased_blocks, seeded
from tests.e2e.stack import Stack
from tests.fixtures.models import make_rand_model

STREAMS = 16
TOKENS = 900  # several seconds, while kvmanagers come and go
EPOCH_OPENED = "epoch opened"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_rand_model(tmp_path_factory.mktemp("rand"), seed=71, context_length=2048)


def requests() -> list[gateway_pb2.GenerationInput]:
    """Half of them begin with the same three blocks."""
    draw = random.Random(7)
    shared = [draw.randrange(256) for _ in range(100)]
    prompts: list[Ids] = [
        [*(shared if number % 2 else []), *(draw.randrange(256) for _ in range(draw.randrange(5, 60)))]
        for number in range(STREAMS)
    ]
    return [greedy(p, TOKENS) if number % 4 else seeded(p, TOKENS, number) for number, p in enumerate(prompts)]


async def test_sixteen_streams_run_on(model: Path) -> None:
    async with Stack(model) as stack:
        calm = await ids_of(stack.gateway, requests())
        await all_blocks_back(stack.gateway)
        steps = [asyncio.Event() for _ in range(STREAMS)]

        async def one(request: gateway_pb2.GenerationInput, begun: asyncio.Event) -> list[int]:
            ids: list[int] = []
            async with channel(stack.gateway) as wire:
                stub = gateway_pb2_grpc.InferenceServiceStub(wire)
                async for message in stub.GenerateStream(gateway_pb2.GenerateStreamRequest(input=request)):
                    ids += message.token_ids
                    if len(ids) >= 8:
                        begun.set()
            return ids

        streams = [asyncio.create_task(one(*pair)) for pair in zip(requests(), steps, strict=True)]
        await asyncio.gather(*(begun.wait() for begun in steps))
        epochs = stack.log("executor").count(EPOCH_OPENED)
        assert epochs > 0
        for _ in range(2):
            assert not all(stream.done() for stream in streams), "the requests are too short for this test"
            await asyncio.to_thread(stack.kill, "kvmanager")
            await asyncio.to_thread(stack.start, "kvmanager")
            await asyncio.to_thread(stack.wait_ready, "kvmanager")
            await asyncio.sleep(0.3)
        while not await leased_blocks(stack.gateway):  # until they are stated to the new one
            assert not all(stream.done() for stream in streams), "they ended without blocks"
            await asyncio.sleep(0.01)
        stormy = await asyncio.gather(*streams)
        assert stormy == calm
        assert stack.log("executor").count(EPOCH_OPENED) == epochs, "sequences were computed anew"
        await all_blocks_back(stack.gateway)

        async with channel(stack.gateway) as wire:
            [answer] = await collect(gateway_pb2_grpc.InferenceServiceStub(wire), requests()[1])
        assert answer.ids == calm[1]
        assert answer.usage is not None
        assert answer.usage.cached_tokens >= 96, "the cache did not survive"
