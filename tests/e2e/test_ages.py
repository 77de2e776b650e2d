"""KV formats by age through all services: a sequence's text depends on its own positions alone."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from quire.v1 import gateway_pb2_grpc
from tests.e2e.requests import all_blocks_back, at_once, channel, collect, greedy, ids_of, seeded, status
from tests.e2e.stack import Stack
from tests.fixtures.models import make_rand_model

AGES = {"kv": "hot+warm+cold", "kv_hot_tokens": 128, "kv_warm_tokens": 256}
TOKENS = 40
LENGTHS = (700, 410, 129, 40)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_rand_model(tmp_path_factory.mktemp("rand"), seed=81)


def prompts() -> list[list[int]]:
    draw = random.Random(8)
    return [[draw.randrange(256) for _ in range(length)] for length in LENGTHS]


@pytest.mark.parametrize("backend", ["cpu", "torch"])
async def test_text_is_the_same_alone_among_neighbours_in_chunks_and_on_a_warm_prefix(
    model: Path, backend: str
) -> None:
    requests = [greedy(prompt, TOKENS) for prompt in prompts()]
    neighbours = [seeded(prompt[n * 7 :], TOKENS, n) for n, prompt in enumerate(prompts())]
    executor = {**AGES, "backend": backend}
    async with Stack(model, executor=executor) as stack:
        alone = [(await ids_of(stack.gateway, [request]))[0] for request in requests]
        warm = [(await ids_of(stack.gateway, [request]))[0] for request in requests]
        assert warm == alone, "on a warm prefix"
        async with channel(stack.gateway) as wire:
            [answer] = await collect(gateway_pb2_grpc.InferenceServiceStub(wire), requests[0])
        assert answer.usage is not None
        assert answer.usage.cached_tokens >= 640
        crowd = await ids_of(stack.gateway, requests + neighbours)
        assert crowd[: len(requests)] == alone, "among neighbours"
        await all_blocks_back(stack.gateway)
        pools = (await status(stack.gateway)).scheduler.kv.pools
        assert len(pools) == 3
        assert all(pool.cached_count for pool in pools), "some age was never used"
    for chunk in (32, 100):
        async with Stack(model, executor=executor, scheduler={"step_tokens": chunk}) as stack:
            assert await ids_of(stack.gateway, requests) == alone, f"in chunks of {chunk}"


async def test_a_small_pool_preempts_and_changes_no_text(model: Path) -> None:
    """Eight sequences that all grow at once, in a pool for about three of them."""
    different = [*prompts(), *(prompt[::-1] for prompt in prompts())]
    requests = [greedy(prompt, 250) for prompt in different]
    async with Stack(model, executor=AGES) as stack:
        alone = [(await ids_of(stack.gateway, [request]))[0] for request in requests]
    async with Stack(model, executor=AGES, kv_blocks=36) as stack:
        for _ in range(4):  # on a busy machine some may have ended before others have grown
            assert await at_once(stack, len(requests), ids_of(stack.gateway, requests)) == alone
            await all_blocks_back(stack.gateway)
            if (await status(stack.gateway)).scheduler.preemption_count:
                return
        pytest.fail("there was always room for all")
