"""Executors drain, join and leave under load, and every service is restarted in order: no request fails."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from quire.v1 import gateway_pb2, gateway_pb2_grpc
from tests.e2e.requests import all_blocks_back, channel, collect, greedy, ids_of, seeded, status
from tests.e2e.stack import Stack
from tests.fixtures.models import make_rand_model

TOKENS = 300
CUT_OFF = "what still runs is cut off"
TURNED_AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
"""The latter is gRPC's word for a call that arrived while its server closed the port."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_rand_model(tmp_path_factory.mktemp("rand"), seed=83)


def requests(count: int, tokens: int = TOKENS) -> list[gateway_pb2.GenerationInput]:
    """Greedy and seeded ones, by turns."""
    prompts = [[(number * 7 + at) % 200 + 1 for at in range(5 + 9 * number)] for number in range(count)]
    return [greedy(p, tokens) if number % 2 else seeded(p, tokens, number) for number, p in enumerate(prompts)]


async def through(stack: Stack, wanted: list[gateway_pb2.GenerationInput], disturb: Any) -> list[list[int]]:
    """Output ids of requests that stream while `disturb`, a blocking function, does its work."""
    begun = [asyncio.Event() for _ in wanted]

    async def one(request: gateway_pb2.GenerationInput, event: asyncio.Event) -> list[int]:
        ids: list[int] = []
        async with channel(stack.gateway) as wire:
            stub = gateway_pb2_grpc.InferenceServiceStub(wire)
            async for message in stub.GenerateStream(gateway_pb2.GenerateStreamRequest(input=request)):
                ids += message.token_ids
                if len(ids) >= 5:
                    event.set()
        return ids

    async with asyncio.TaskGroup() as group:
        streams = [group.create_task(one(*pair)) for pair in zip(wanted, begun, strict=True)]
        await asyncio.gather(*(event.wait() for event in begun))
        assert not any(stream.done() for stream in streams), "the requests are too short for this test"
        await asyncio.to_thread(disturb)
    return [stream.result() for stream in streams]


def run(*arguments: str) -> str:
    """What a command says."""
    done = subprocess.run([sys.executable, "-m", "quire.cli", *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def quire(stack: Stack, *arguments: str) -> list[dict[str, Any]]:
    """`quire executors ... --json`."""
    executors: list[dict[str, Any]] = json.loads(run("executors", *arguments, "--address", stack.gateway, "--json"))
    return executors


async def running(stack: Stack) -> dict[str, int]:
    """Sequences on each executor, by its address."""
    return {e.target: e.running_count for e in (await status(stack.gateway)).scheduler.executors}


async def test_an_executor_that_is_told_to_end_leaves_its_streams_to_others(model: Path) -> None:
    async with Stack(model, executors=2) as stack:
        calm = await ids_of(stack.gateway, requests(6))
        ended: list[int] = []
        stormy = await through(stack, requests(6), lambda: ended.append(stack.stop("executor")))
        assert stormy == calm
        assert ended == [0]
        assert CUT_OFF not in stack.log("executor")
        await all_blocks_back(stack.gateway)
        stack.start("executor")
        await asyncio.to_thread(stack.wait_ready)
        target = stack.target("executor")
        async with asyncio.timeout(60):
            while not any(
                e.target == target and e.connected for e in (await status(stack.gateway)).scheduler.executors
            ):
                await asyncio.sleep(0.05)
        assert await ids_of(stack.gateway, requests(6)) == calm


async def test_executors_join_drain_and_leave_by_command(model: Path, tmp_path: Path) -> None:
    async with Stack(model, executor={"max_sequences": 4}) as stack:
        wanted = requests(12)
        calm = await ids_of(stack.gateway, wanted)
        name = await asyncio.to_thread(stack.join, model)
        first, second = stack.target("executor"), stack.target(name)
        assert [e["target"] for e in quire(stack, "list")] == [first]

        def change() -> None:
            assert [e["connected"] for e in quire(stack, "add", second)] == [True, True]
            drained = {e["target"]: e["draining"] for e in quire(stack, "drain", first)}
            assert drained == {first: True, second: False}

        assert await through(stack, requests(4, 900), change) == await ids_of(stack.gateway, requests(4, 900))
        assert await ids_of(stack.gateway, wanted) == calm
        assert (await running(stack))[first] == 0
        assert [e["target"] for e in quire(stack, "remove", first)] == [second]
        assert stack.stop("executor") == 0
        assert await ids_of(stack.gateway, wanted) == calm
        await all_blocks_back(stack.gateway)

        other = make_rand_model(tmp_path / "other", seed=84)
        quire(stack, "add", stack.target(await asyncio.to_thread(stack.join, None)))
        run("models", "load", f"other={other}", "--address", stack.gateway)
        assert len((await ids_of(stack.gateway, [greedy([1, 2], 4, model="other")]))[0]) == 4


class Load:
    """Clients that ask without pause, each its own question, and check every answer."""

    def __init__(self, target: str, wanted: list[gateway_pb2.GenerationInput], answers: list[list[int]]) -> None:
        self._target, self._pairs = target, list(zip(wanted, answers, strict=True))
        self._over = False
        self.answered: Counter[int] = Counter()
        self.refusals = 0  # before anything was streamed, as a gateway that is about to end does

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as clients:
            for number, pair in enumerate(self._pairs):
                clients.create_task(self._ask(number, *pair))
            yield
            self._over = True

    async def more(self) -> None:
        """Returns once every client had two more answers: the second was asked for after this call."""
        before = Counter(self.answered)
        async with asyncio.timeout(120):
            while any(self.answered[number] < before[number] + 2 for number in range(len(self._pairs))):
                await asyncio.sleep(0.05)

    async def _ask(self, number: int, request: gateway_pb2.GenerationInput, answer: list[int]) -> None:
        async with channel(self._target) as wire:
            stub = gateway_pb2_grpc.InferenceServiceStub(wire)
            while not self._over:
                ids: list[int] = []
                call = stub.GenerateStream(gateway_pb2.GenerateStreamRequest(input=request), wait_for_ready=True)
                try:
                    async for message in call:
                        ids += message.token_ids
                except grpc.aio.AioRpcError as error:
                    if ids or error.code() not in TURNED_AWAY:
                        raise
                    self.refusals += 1
                    await asyncio.sleep(0.1)
                else:
                    assert ids == answer
                    self.answered[number] += 1


async def test_a_rolling_restart_of_everything_fails_no_request(model: Path) -> None:
    """In any order; only the gateway may turn a request away, before its first token, for the client to ask again."""
    async with Stack(model, executors=2) as stack:
        wanted = requests(6, 150)
        load = Load(stack.gateway, wanted, await ids_of(stack.gateway, wanted))
        async with load.running():
            for name in ("executor", "executor-2", "kvmanager", "scheduler", "gateway"):
                await load.more()
                assert await asyncio.to_thread(stack.stop, name) == 0
                await asyncio.to_thread(stack.start, name)
                await asyncio.to_thread(stack.wait_ready)
                await load.more()
                assert not load.refusals or name == "gateway", f"{name}: {load.refusals} requests were turned away"
                assert CUT_OFF not in stack.log(name)
        async with channel(stack.gateway) as wire:
            [answer] = await collect(gateway_pb2_grpc.InferenceServiceStub(wire), wanted[0])
        assert len(answer.ids) == 150
        await all_blocks_back(stack.gateway)
