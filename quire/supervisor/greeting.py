"""What a person sees once a run is up: a first answer of the model, and where to connect."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import TextIO

import grpc

from quire.client import bearer
from quire.supervisor.rundir import RunState
from quire.v1 import gateway_pb2, gateway_pb2_grpc, types_pb2

QUESTION = "What is paper made of? Answer in one sentence."
TOKENS = 48


async def first_answer(target: str, model: str, api_key: str, out: TextIO) -> None:
    """Streams an answer of `model` to `out`. Raises grpc.RpcError where it fails."""
    async with grpc.aio.insecure_channel(target) as channel:
        stub = gateway_pb2_grpc.InferenceServiceStub(channel)
        out.write(f"\n{model}> {QUESTION}\n")
        out.flush()
        started, first = time.monotonic(), None
        try:
            async for text in _answer(stub, model, api_key):
                first = first or time.monotonic() - started
                out.write(text)
                out.flush()
        finally:
            out.write("\n")
        if first is not None:
            out.write(f"(first text after {first * 1e3:.0f} ms)\n")
        out.flush()


async def wait_for_model(target: str, names: list[str], api_key: str) -> None:
    """Returns once the gateway lists every name. Waits for ever; bound it from outside."""
    async with grpc.aio.insecure_channel(target) as channel:
        stub = gateway_pb2_grpc.InferenceServiceStub(channel)
        while True:
            listed = await stub.ListModels(
                gateway_pb2.ListModelsRequest(), wait_for_ready=True, metadata=bearer(api_key)
            )
            if set(names) <= {model.name for model in listed.models}:
                return
            await asyncio.sleep(0.05)


def where_to_connect(state: RunState, is_locked: bool) -> str:
    """The lines that say how to use the run. `is_locked`: callers must show an API key."""
    keys = ["  API keys    callers need one: --api-key KEY, or the variable QUIRE_API_KEY"] if is_locked else []
    return "\n".join(
        [
            f"Quire serves {', '.join(state.models)}.",
            f"  gRPC        {state.grpc}   (quire.v1.InferenceService, with reflection)",
            f"  OpenAI API  {state.http}/v1",
            *keys,
            f"  log         {state.log}",
            '  try         quire chat    or    quire generate "Once upon a time"',
            "  stop        quire down",
        ]
    )


async def _answer(stub: gateway_pb2_grpc.InferenceServiceAsyncStub, model: str, api_key: str) -> AsyncIterator[str]:
    chat = gateway_pb2.Chat(messages=[gateway_pb2.ChatMessage(role="user", content=QUESTION)])
    started = False
    try:
        async for text in _stream(stub, gateway_pb2.GenerationInput(model=model, chat=chat), api_key):
            started = True
            yield text
    except grpc.aio.AioRpcError as error:
        if started or error.code() not in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED):
            raise
        # A base model has no chat template; it continues text.
        async for text in _stream(stub, gateway_pb2.GenerationInput(model=model, text=QUESTION), api_key):
            yield text


async def _stream(
    stub: gateway_pb2_grpc.InferenceServiceAsyncStub, asked: gateway_pb2.GenerationInput, api_key: str
) -> AsyncIterator[str]:
    asked.sampling.CopyFrom(types_pb2.SamplingParams(temperature=0))
    asked.stop.max_tokens = TOKENS
    request = gateway_pb2.GenerateStreamRequest(input=asked)
    async for message in stub.GenerateStream(request, timeout=120, metadata=bearer(api_key)):
        if message.text:
            yield message.text
