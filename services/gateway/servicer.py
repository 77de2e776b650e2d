"""The gRPC surface: translates between the public API and the engine. Who may call what, the guard decides."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from quire.v1 import gateway_pb2, gateway_pb2_grpc, types_pb2
from services.common.errors import invalid
from services.common.limits import MAX_CHOICES
from services.gateway import wire
from services.gateway.calls import Calls, Context, tell_rates
from services.gateway.embedding import collect
from services.gateway.engine import Engine
from services.gateway.events import Delta, Finished, PromptScores, Started
from services.gateway.guard import caller


class InferenceServicer(gateway_pb2_grpc.InferenceServiceServicer):
    """Text generation for clients."""

    def __init__(self, engine: Engine, calls: Calls) -> None:
        self._engine, self._calls = engine, calls

    async def GenerateStream(
        self, request: gateway_pb2.GenerateStreamRequest, context: Context
    ) -> AsyncIterator[gateway_pb2.GenerateStreamResponse]:
        events = self._calls.generate(request.input, context)
        started: Started | None = None
        running = request.input.choice_count or 1
        last = gateway_pb2.GenerateStreamResponse()
        async for event in events:
            match event:
                case Started():
                    started = event
                    await tell_rates(event, context)
                case PromptScores():
                    scores = await asyncio.to_thread(wire.scored_tokens, event.tokens)
                    assert started is not None, "scores before their start"
                    yield gateway_pb2.GenerateStreamResponse(
                        request_id=started.request_id, model=started.model, prompt_logprobs=scores
                    )
                case Delta():
                    assert started is not None, "a delta before its start"
                    last = wire.stream_response(started, event)
                    running -= event.finish_reason is not None
                    if running:  # the very last one leaves together with the usage
                        yield last
                case Finished():
                    last.usage.CopyFrom(wire.usage(event))
                    yield last

    async def Generate(self, request: gateway_pb2.GenerateRequest, context: Context) -> gateway_pb2.GenerateResponse:
        response = gateway_pb2.GenerateResponse()
        started: Started | None = None
        parts = [wire.ChoiceParts(index) for index in range(max(1, min(request.input.choice_count, MAX_CHOICES)))]
        async for event in self._calls.generate(request.input, context):
            match event:
                case Started():
                    started = event
                    response.request_id, response.model = event.request_id, event.model
                    await tell_rates(event, context)
                case PromptScores():
                    response.prompt_logprobs.extend(await asyncio.to_thread(wire.scored_tokens, event.tokens))
                case Delta():
                    parts[event.choice].add(event)
                case Finished():
                    response.usage.CopyFrom(wire.usage(event))
        assert started is not None, "an end before its start"
        response.choices.extend(part.whole(started) for part in parts)
        return response

    async def Embed(self, request: gateway_pb2.EmbedRequest, context: Context) -> gateway_pb2.EmbedResponse:
        vector = await collect(self._calls.embed(request, context))
        if vector.headers:
            await context.send_initial_metadata(tuple(vector.headers.items()))
        return gateway_pb2.EmbedResponse(
            request_id=vector.request_id,
            model=vector.model,
            values=vector.values,
            usage=types_pb2.Usage(prompt_tokens=vector.prompt_tokens),
        )

    async def Tokenize(self, request: gateway_pb2.TokenizeRequest, context: Context) -> gateway_pb2.TokenizeResponse:
        kind = request.WhichOneof("prompt")
        if kind is None:
            raise invalid("prompt", "one of text and chat is required")
        ids, model = await self._engine.tokenize(
            request.model,
            request.text if kind == "text" else request.chat,
            caller=caller(),
            add_special=not request.skip_special_tokens,
        )
        return gateway_pb2.TokenizeResponse(token_ids=ids, context_length=model.context_length)

    async def Detokenize(
        self, request: gateway_pb2.DetokenizeRequest, context: Context
    ) -> gateway_pb2.DetokenizeResponse:
        text = await self._engine.detokenize(
            request.model, request.token_ids, caller=caller(), skip_special=not request.keep_special_tokens
        )
        return gateway_pb2.DetokenizeResponse(text=text)

    async def ListModels(
        self, request: gateway_pb2.ListModelsRequest, context: Context
    ) -> gateway_pb2.ListModelsResponse:
        return gateway_pb2.ListModelsResponse(models=self._engine.models(caller()))


class AdminServicer(gateway_pb2_grpc.AdminServiceServicer):
    """Operations for whoever runs the service."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def GetStatus(self, request: gateway_pb2.GetStatusRequest, context: Context) -> gateway_pb2.GetStatusResponse:
        return await self._engine.status()

    async def ChangeModel(
        self, request: gateway_pb2.ChangeModelRequest, context: Context
    ) -> gateway_pb2.ChangeModelResponse:
        models = await self._engine.change_model(request.action, request.name, request.source)
        return gateway_pb2.ChangeModelResponse(models=models)

    async def ChangeExecutor(
        self, request: gateway_pb2.ChangeExecutorRequest, context: Context
    ) -> gateway_pb2.ChangeExecutorResponse:
        executors = await self._engine.change_executor(request.action, request.target)
        return gateway_pb2.ChangeExecutorResponse(executors=executors)

    async def GetUsage(self, request: gateway_pb2.GetUsageRequest, context: Context) -> gateway_pb2.GetUsageResponse:
        rows = await self._engine.usage(request.first_day, request.last_day)
        chosen = [row for row in rows if request.tenant in ("", row.tenant)]
        return gateway_pb2.GetUsageResponse(rows=map(wire.usage_row, chosen))
