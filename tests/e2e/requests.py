"""Plain gRPC requests for end-to-end tests."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc

from quire.v1 import admin_pb2, admin_pb2_grpc, gateway_pb2, gateway_pb2_grpc, types_pb2
from services.common.rpc import OPTIONS
from tests.e2e.stack import Stack

Ids = Sequence[int]
T = TypeVar("T")


@dataclass
class Answer:
    """What one choice of a stream came to."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    finish: int = types_pb2.FINISH_REASON_UNSPECIFIED
    usage: types_pb2.Usage | None = None


def channel(target: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(target, options=OPTIONS)


def greedy(prompt: Ids | str, tokens: int, **more: Any) -> gateway_pb2.GenerationInput:
    """A greedy request of exactly `tokens` tokens; `more` are further fields of the input."""
    request = gateway_pb2.GenerationInput(
        sampling=types_pb2.SamplingParams(temperature=0),
        stop=types_pb2.StopCriteria(max_tokens=tokens, ignore_eos=True),
        **more,
    )
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.token_ids.ids.extend(prompt)
    return request


def seeded(prompt: Ids | str, tokens: int, seed: int, **more: Any) -> gateway_pb2.GenerationInput:
    """A sampled request with a seed, also exact in length."""
    request = greedy(prompt, tokens, **more)
    request.sampling.CopyFrom(types_pb2.SamplingParams(temperature=1.0, seed=seed, top_p=0.95))
    return request


async def collect(
    stub: gateway_pb2_grpc.InferenceServiceAsyncStub, request: gateway_pb2.GenerationInput
) -> list[Answer]:
    """Streams a request to its end; one answer per choice."""
    answers = [Answer() for _ in range(max(1, request.choice_count))]
    async for message in stub.GenerateStream(gateway_pb2.GenerateStreamRequest(input=request)):
        answer = answers[message.choice]
        answer.ids += message.token_ids
        answer.text += message.text
        answer.finish = message.finish_reason or answer.finish
        if message.HasField("usage"):
            answers[0].usage = message.usage
    return answers


async def ids_of(target: str, requests: Sequence[gateway_pb2.GenerationInput]) -> list[list[int]]:
    """Output ids of requests sent together, each with one choice."""
    async with channel(target) as wire:
        stub = gateway_pb2_grpc.InferenceServiceStub(wire)
        answers = await asyncio.gather(*(collect(stub, request) for request in requests))
    return [answer[0].ids for answer in answers]


async def at_once(stack: Stack, count: int, answers: Coroutine[Any, Any, T]) -> T:
    """What `answers`, with `count` sequences, come to when all of them are there before the first step.

    However fast the executor is, they run beside each other: it stands still until the scheduler has them.
    """
    stack.freeze("executor")
    try:
        running = asyncio.create_task(answers)
        async with asyncio.timeout(20):
            while not running.done():
                scheduler = (await status(stack.gateway)).scheduler
                if scheduler.running_count + scheduler.waiting_count >= count:
                    break
                await asyncio.sleep(0.01)
    finally:
        stack.thaw("executor")
    return await running


async def status(target: str) -> Any:
    """GetStatus of a gateway."""
    async with channel(target) as wire:
        return await admin_pb2_grpc.AdminServiceStub(wire).GetStatus(admin_pb2.GetStatusRequest())


async def leased_blocks(target: str) -> int:
    """Blocks that sequences hold now; fails where the integrity check found something. Waits for the kvmanager."""
    while not (scheduler := (await status(target)).scheduler).HasField("kv"):
        await asyncio.sleep(0.05)
    kv = scheduler.kv
    assert not kv.violations, list(kv.violations)
    return sum(pool.leased_count for pool in kv.pools)


async def all_blocks_back(target: str, seconds: float = 20.0) -> None:
    """Returns once nothing is held; fails after `seconds`."""
    async with asyncio.timeout(seconds):
        while await leased_blocks(target):
            await asyncio.sleep(0.05)
