"""Killed services: streams go on with every token once, or end with an error; never silently."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import grpc
import httpx
import pytest

from quire.v1 import admin_pb2, admin_pb2_grpc, gateway_pb2, gateway_pb2_grpc, scheduler_pb2
from tests.e2e.requests import Answer, all_blocks_back, channel, collect, greedy, ids_of, seeded, status
from tests.e2e.stack import Stack
from tests.fixtures.models import make_rand_model

TOKENS = 400
PROMPTS = [[3, 1, 4, 1, 5], [9] * 40, [2, 6, 5]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_rand_model(tmp_path_factory.mktemp("rand"), seed=21)


def wanted() -> list[gateway_pb2.GenerationInput]:
    """A plain, a seeded and an n = 2 request."""
    return [greedy(PROMPTS[0], TOKENS), seeded(PROMPTS[1], TOKENS, 7), seeded(PROMPTS[2], TOKENS, 8, choice_count=2)]


async def answers_through(stack: Stack, disturb: Callable[[], None]) -> list[list[Answer]]:
    """Runs the requests and disturbs the stack once each has streamed a few tokens."""
    begun = [asyncio.Event() for _ in PROMPTS]

    async def one(request: gateway_pb2.GenerationInput, event: asyncio.Event) -> list[Answer]:
        async with channel(stack.gateway) as wire:
            stub = gateway_pb2_grpc.InferenceServiceStub(wire)
            out = [Answer() for _ in range(max(1, request.choice_count))]
            async for message in stub.GenerateStream(gateway_pb2.GenerateStreamRequest(input=request)):
                out[message.choice].ids += message.token_ids
                out[message.choice].finish = message.finish_reason or out[message.choice].finish
                if len(out[0].ids) >= 5:
                    event.set()
            return out

    tasks = [asyncio.create_task(one(request, event)) for request, event in zip(wanted(), begun, strict=True)]
    await asyncio.gather(*(event.wait() for event in begun))
    assert not any(task.done() for task in tasks), "the requests are too short for this test"
    await asyncio.to_thread(disturb)
    return await asyncio.gather(*tasks)


@pytest.mark.parametrize("victim", ["executor", "scheduler", "kvmanager"])
async def test_streams_survive_a_restart_of(victim: str, model: Path) -> None:
    """Case E3: the same ids as undisturbed, none lost or repeated."""

    async with Stack(model) as stack:

        def restart() -> None:
            stack.kill(victim)
            stack.start(victim)

        async with channel(stack.gateway) as wire:
            stub = gateway_pb2_grpc.InferenceServiceStub(wire)
            calm = [await collect(stub, request) for request in wanted()]
        stormy = await answers_through(stack, restart)
        for before, after in zip(calm, stormy, strict=True):
            assert [answer.ids for answer in after] == [answer.ids for answer in before]
            assert [answer.finish for answer in after] == [answer.finish for answer in before]
        await all_blocks_back(stack.gateway)


async def test_an_executor_that_stays_away_ends_streams_with_an_error(model: Path) -> None:
    """Case A7, over gRPC and as server-sent events."""
    async with Stack(model, scheduler={"resume_seconds": 1}) as stack:
        body = {"model": "tiny", "prompt": PROMPTS[0], "max_tokens": TOKENS, "ignore_eos": True, "stream": True}

        async def events() -> list[str]:
            async with (
                httpx.AsyncClient(timeout=60) as http,
                http.stream("POST", f"{stack.http}/v1/completions", json=body) as answer,
            ):
                return [line[6:] async for line in answer.aiter_lines() if line.startswith("data: ")]

        sse = asyncio.create_task(events())
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await answers_through(stack, lambda: stack.kill("executor"))
        assert failure.value.code() == grpc.StatusCode.UNAVAILABLE
        seen = await sse
        assert "[DONE]" not in seen
        assert "error" in json.loads(seen[-1])
        # And it recovers.
        stack.start("executor")
        await asyncio.to_thread(stack.wait_ready)
        assert len((await ids_of(stack.gateway, [greedy([1, 2], 4)]))[0]) == 4


async def test_a_reload_of_other_weights_reuses_no_prefix(tmp_path: Path) -> None:
    """Case F2: the same name, other weights."""
    prompt = [5] * 100
    folder = make_rand_model(tmp_path / "model", seed=1)
    other = make_rand_model(tmp_path / "other", seed=2)
    async with Stack(other) as stack:
        cold = await ids_of(stack.gateway, [greedy(prompt, 16)])
    async with Stack(folder) as stack:
        first = await ids_of(stack.gateway, [greedy(prompt, 16)])
        (folder / "model.safetensors").write_bytes((other / "model.safetensors").read_bytes())
        async with channel(stack.gateway) as wire:
            admin = admin_pb2_grpc.AdminServiceStub(wire)
            await admin.ChangeModel(admin_pb2.ChangeModelRequest(action=scheduler_pb2.MODEL_ACTION_RELOAD, name="tiny"))
        second = await ids_of(stack.gateway, [greedy(prompt, 16)])
        assert second == cold
        assert first != second


async def test_a_frozen_executor_is_noticed(model: Path) -> None:
    """Case K1: stopped, not dead."""
    async with Stack(model, scheduler={"stall_seconds": 2, "resume_seconds": 2}) as stack:
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await answers_through(stack, lambda: stack.freeze("executor"))
        assert failure.value.code() == grpc.StatusCode.UNAVAILABLE
        stack.thaw("executor")
        async with asyncio.timeout(30):
            while (await status(stack.gateway)).scheduler.executors[0].connected is False:
                await asyncio.sleep(0.2)
        assert len((await ids_of(stack.gateway, [greedy([1, 2], 4)]))[0]) == 4


@pytest.mark.full
@pytest.mark.parametrize("victim", ["scheduler", "kvmanager"])
async def test_a_frozen_peer_is_noticed_by_its_silence_on_the_wire(victim: str, model: Path) -> None:
    """Case K1: keepalive ends what no request can: 30 s at most, then `resume_seconds`."""
    async with Stack(model, scheduler={"resume_seconds": 1}, gateway={"resume_seconds": 1}) as stack:
        async with asyncio.timeout(45):
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await answers_through(stack, lambda: stack.freeze(victim))
        assert failure.value.code() == grpc.StatusCode.UNAVAILABLE
        stack.thaw(victim)
        await asyncio.to_thread(stack.wait_ready)
        assert len((await ids_of(stack.gateway, [greedy([1, 2], 4)]))[0]) == 4
        await all_blocks_back(stack.gateway)
