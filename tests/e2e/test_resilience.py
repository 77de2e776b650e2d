"""Two gateways, one Redis, all four services as processes: what is killed under load, and what clients see of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator

import grpc
import httpx
import pytest

from quire.v1 import gateway_pb2, gateway_pb2_grpc
from tests.e2e.requests import all_blocks_back, channel, collect, greedy, seeded
from tests.e2e.stack import Stack
from tests.fixtures.models import make_rand_model
from tests.fixtures.redis_server import RedisServer

TOKENS = 400
PROMPTS = [[3, 1, 4, 1, 5], [9] * 40, [2, 6, 5], [8] * 9]


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, redis: RedisServer) -> Iterator[Stack]:
    model = make_rand_model(tmp_path_factory.mktemp("rand"), seed=77)
    settings = {"redis": redis.url, "journal": "redis", "resume_window": 20}
    with Stack(model, gateways=2, gateway=settings) as running:
        yield running


def wanted() -> list[gateway_pb2.GenerationInput]:
    """Plain, seeded, n = 2, and with log probabilities."""
    scored = greedy(PROMPTS[3], TOKENS, logprobs={"output_count": 1})
    return [
        greedy(PROMPTS[0], TOKENS),
        seeded(PROMPTS[1], TOKENS, 7),
        seeded(PROMPTS[2], TOKENS, 8, choice_count=2),
        scored,
    ]


class Follower:
    """A client that comes back to another gateway for the rest when its own is gone."""

    def __init__(self, request: gateway_pb2.GenerationInput) -> None:
        self.request = request
        self.ids: list[list[int]] = [[] for _ in range(max(1, request.choice_count))]
        self.ends = [0] * len(self.ids)
        self.begun, self.resumed = asyncio.Event(), 0
        self._last = ""

    async def run(self, *targets: str) -> list[list[int]]:
        for target in targets:
            try:
                async with channel(target) as wire:
                    stub = gateway_pb2_grpc.InferenceServiceStub(wire)
                    await self._read(stub)
                return self.ids
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
                self.resumed += 1
        raise AssertionError("no gateway is left")

    async def _read(self, stub: gateway_pb2_grpc.InferenceServiceAsyncStub) -> None:
        asked = gateway_pb2.GenerateStreamRequest(input=self.request, last_event_id=self._last)
        async for message in stub.GenerateStream(asked):
            self.ids[message.choice] += message.token_ids
            self.ends[message.choice] += message.finish_reason != 0
            self._last = message.event_id
            if len(self.ids[0]) >= 5:
                self.begun.set()


async def undisturbed(target: str) -> list[list[list[int]]]:
    async with channel(target) as wire:
        stub = gateway_pb2_grpc.InferenceServiceStub(wire)
        return [[answer.ids for answer in await collect(stub, request)] for request in wanted()]


async def disturbed(
    followers: list[Follower], targets: list[str], disturb: Callable[[], None]
) -> list[list[list[int]]]:
    running = [asyncio.create_task(follower.run(*targets)) for follower in followers]
    await asyncio.gather(*(follower.begun.wait() for follower in followers))
    assert not any(task.done() for task in running), "the requests are too short for this test"
    await asyncio.to_thread(disturb)
    return await asyncio.gather(*running)


async def sse(lines: AsyncIterator[str]) -> AsyncIterator[tuple[str, str]]:
    """(id, data) of each event."""
    fields: dict[str, str] = {}
    async for line in lines:
        if line:
            name, _, value = line.partition(": ")
            fields[name] = value
        elif fields:
            yield fields.get("id", ""), fields["data"]
            fields = {}


async def test_streams_of_a_killed_gateway_go_on_at_the_other(stack: Stack) -> None:
    """kill -9: over gRPC and as server-sent events; complete, and no token twice."""
    calm = await undisturbed(stack.gateway)
    body = {
        "model": "tiny",
        "prompt": PROMPTS[0],
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    other = f"http://{stack.services['gateway-2'].settings['http_listen']}"
    texts: list[str] = []
    last = [""]
    begun = asyncio.Event()

    async def events(base: str, headers: dict[str, str]) -> list[str]:
        data: list[str] = []
        async with (
            httpx.AsyncClient(base_url=base, timeout=60) as http,
            http.stream("POST", "/v1/completions", json=body, headers=headers) as answer,
        ):
            assert answer.status_code == 200
            async for event_id, content in sse(answer.aiter_lines()):
                data.append(content)
                if event_id:
                    last[0] = event_id
                if content.startswith("{"):
                    texts.extend(choice["text"] for choice in json.loads(content)["choices"])
                if len(texts) >= 3:
                    begun.set()
        return data

    async def whole() -> list[str]:
        try:
            await events(stack.http, {})
        except httpx.TransportError:
            return await events(other, {"last-event-id": last[0]})
        raise AssertionError("the gateway was not killed in time")

    async with httpx.AsyncClient(timeout=60) as http:
        calm_text = (await http.post(f"{other}/v1/completions", json=body | {"stream": False})).json()
    streaming = asyncio.create_task(whole())
    await begun.wait()
    followers = [Follower(request) for request in wanted()]
    stormy = await disturbed(followers, [stack.gateway, stack.target("gateway-2")], lambda: stack.kill("gateway"))
    assert stormy == calm
    assert [follower.resumed for follower in followers] == [1] * 4
    assert all(end == 1 for follower in followers for end in follower.ends)
    assert (await streaming)[-1] == "[DONE]"
    assert "".join(texts) == calm_text["choices"][0]["text"]
    stack.start("gateway")
    await asyncio.to_thread(stack.wait_ready, "gateway")
    await all_blocks_back(stack.gateway)


async def test_streams_go_on_when_redis_is_killed(stack: Stack, redis: RedisServer) -> None:
    """And new ones begin, for that is how limits are set; once it is back streams can be resumed elsewhere again."""
    calm = await undisturbed(stack.gateway)
    followers = [Follower(request) for request in wanted()]
    assert await disturbed(followers, [stack.gateway], redis.kill) == calm
    assert [follower.resumed for follower in followers] == [0] * 4
    assert await undisturbed(stack.gateway) == calm
    await asyncio.to_thread(redis.start)
    await asyncio.sleep(2.5)  # until it is asked again
    followers = [Follower(request) for request in wanted()[:1]]
    targets = [stack.gateway, stack.target("gateway-2")]
    assert await disturbed(followers, targets, lambda: stack.kill("gateway")) == calm[:1]
    stack.start("gateway")
    await asyncio.to_thread(stack.wait_ready, "gateway")
    await all_blocks_back(stack.gateway)


async def test_a_gateway_that_ends_in_order_hands_over_what_nobody_reads(stack: Stack) -> None:
    calm = await undisturbed(stack.gateway)
    follower = Follower(wanted()[0])
    running = asyncio.create_task(follower.run(stack.gateway))
    await follower.begun.wait()
    running.cancel()
    await asyncio.wait([running])
    await asyncio.sleep(0.3)
    assert await asyncio.to_thread(stack.stop, "gateway") == 0
    assert [await follower.run(stack.target("gateway-2"))] == calm[:1]
    stack.start("gateway")
    await asyncio.to_thread(stack.wait_ready, "gateway")
    await all_blocks_back(stack.gateway)
