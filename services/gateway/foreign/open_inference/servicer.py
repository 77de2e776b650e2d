"""The Open Inference Protocol: a language model as named tensors, by the conventions of Triton's vLLM backend."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

import quire
from quire.v1.foreign import open_inference_pb2 as oip
from quire.v1.foreign import open_inference_pb2_grpc
from quire.v1.gateway_pb2 import GenerationInput
from services.common.errors import QuireError
from services.gateway.calls import Calls, Context, tell_rates
from services.gateway.engine import Engine
from services.gateway.events import Delta, Event, Started
from services.gateway.foreign.errors import naming
from services.gateway.foreign.open_inference.answer import Answer
from services.gateway.foreign.open_inference.request import VERSION, Asked, check_version, read_request
from services.gateway.foreign.open_inference.tensors import INPUTS, OUTPUTS
from services.gateway.generation import Generation
from services.gateway.guard import caller
from services.gateway.http.default_budget import generate_within_context

PLATFORM = "quire"
MOST_AT_ONCE = 64
"""Requests of one stream that run side by side; the next one is read when one of them ended."""


class OpenInferenceServicer(open_inference_pb2_grpc.GRPCInferenceServiceServicer):
    """Models are those of the other surfaces, each of one version."""

    def __init__(self, engine: Engine, calls: Calls) -> None:
        self._engine, self._calls = engine, calls

    async def ServerLive(self, request: oip.ServerLiveRequest, context: Context) -> oip.ServerLiveResponse:
        return oip.ServerLiveResponse(live=True)

    async def ServerReady(self, request: oip.ServerReadyRequest, context: Context) -> oip.ServerReadyResponse:
        return oip.ServerReadyResponse(ready=self._engine.ready)

    async def ModelReady(self, request: oip.ModelReadyRequest, context: Context) -> oip.ModelReadyResponse:
        names = [model.name for model in self._engine.models(caller())]
        there = request.name in names and request.version in ("", VERSION)
        return oip.ModelReadyResponse(ready=there and self._engine.ready)

    async def ServerMetadata(self, request: oip.ServerMetadataRequest, context: Context) -> oip.ServerMetadataResponse:
        return oip.ServerMetadataResponse(name=PLATFORM, version=quire.__version__)

    async def ModelMetadata(self, request: oip.ModelMetadataRequest, context: Context) -> oip.ModelMetadataResponse:
        check_version("version", request.version)
        with naming({"model": "name"}):
            model = self._engine.model(request.name, caller())
        kind = oip.ModelMetadataResponse.TensorMetadata
        return oip.ModelMetadataResponse(
            name=model.name,
            versions=[VERSION],
            platform=PLATFORM,
            inputs=[kind(name=name, datatype=datatype, shape=[1]) for name, datatype in INPUTS.items()],
            outputs=[kind(name=name, datatype=datatype, shape=[-1]) for name, datatype in OUTPUTS.items()],
        )

    async def ModelInfer(self, request: oip.ModelInferRequest, context: Context) -> oip.ModelInferResponse:
        async with aclosing(self._answers(request, context, None)) as answers:
            return await anext(answers)

    async def ModelStreamInfer(
        self, requests: AsyncIterator[oip.ModelInferRequest], context: Context
    ) -> AsyncIterator[oip.ModelStreamInferResponse]:
        handler = asyncio.current_task()
        assert handler is not None
        written: asyncio.Queue[oip.ModelStreamInferResponse | Exception | None] = asyncio.Queue(maxsize=1)
        places = asyncio.Semaphore(MOST_AT_ONCE)

        async def answer(request: oip.ModelInferRequest) -> None:
            try:
                async with aclosing(self._answers(request, context, handler)) as answers:
                    async for response in answers:
                        await written.put(oip.ModelStreamInferResponse(infer_response=response))
            except QuireError as error:
                failed = oip.ModelInferResponse(model_name=request.model_name, id=request.id)
                await written.put(oip.ModelStreamInferResponse(error_message=error.message, infer_response=failed))
            finally:
                places.release()

        async def read() -> None:
            try:
                async with asyncio.TaskGroup() as running:
                    async for request in requests:
                        await places.acquire()
                        running.create_task(answer(request))
            except Exception as error:
                await written.put(error)
            else:
                await written.put(None)

        reading = asyncio.create_task(read())
        try:
            while (message := await written.get()) is not None:
                if isinstance(message, Exception):
                    raise message
                yield message
        finally:
            reading.cancel()
            await asyncio.wait([reading])

    async def _answers(
        self, request: oip.ModelInferRequest, context: Context, stream: asyncio.Task[Any] | None
    ) -> AsyncGenerator[oip.ModelInferResponse, None]:
        """The answer whole; on a stream, which `stream` handles, in pieces where the request asks for that."""
        with naming({"model": "model_name"}):
            model = self._engine.model(request.model_name, caller())
            asked = read_request(request, model.name, may_stream=stream is not None)
        answer = Answer(asked, model.name, request.id)
        with naming(asked.names):
            async with aclosing(self._events(asked, context, stream)) as events:
                async for event in events:
                    if isinstance(event, Started):
                        answer.started(len(event.prompt_token_ids))
                        if stream is None:
                            await tell_rates(event, context)
                    elif isinstance(event, Delta):
                        answer.add(event)
                        if asked.stream:
                            yield answer.piece()
        if not asked.stream:
            yield answer.whole()

    def _events(
        self, asked: Asked, context: Context, stream: asyncio.Task[Any] | None
    ) -> Generation | AsyncGenerator[Event, None]:
        def generate(one: GenerationInput) -> Generation:
            return self._calls.generate(one, context, timeout=asked.timeout, within=stream)

        return generate_within_context(generate, asked.input) if asked.default_budget else generate(asked.input)
