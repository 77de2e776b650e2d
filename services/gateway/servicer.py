"""The gRPC surface: translates between the public API and the engine. Who may call what, the guard decides."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from quire.v1 import admin_pb2, admin_pb2_grpc, gateway_pb2, gateway_pb2_grpc, types_pb2
from services.common.errors import invalid
from services.common.limits import MAX_CHOICES
from services.gateway import wire
from services.gateway.calls import Calls, Context, tell_rates
from services.gateway.embedding import collect
from services.gateway.engine import Engine
from services.gateway.events import Delta, Finished, PromptScores, Started
from services.gateway.guard import caller
from services.gateway.positions import Seen, Track, event_id, parse_event_id


class InferenceServicer(gateway_pb2_grpc.InferenceServiceServicer):
    """Text generation for clients."""

    def __init__(self, engine: Engine, calls: Calls) -> None:
        self._engine, self._calls = engine, calls

    async def GenerateStream(
        self, request: gateway_pb2.GenerateStreamRequest, context: Context
    ) -> AsyncIterator[gateway_pb2.GenerateStreamResponse]:
        started: Started | None = None
        running = request.input.choice_count or 1
        seen = _resumed(request, running)
        events = self._calls.generate(request.input, context, seen=seen)
        last = gateway_pb2.GenerateStreamResponse()
        track = Track(0)
        kept = False
        async for event in events:
            match event:
                case Started():
                    started = event
                    last = gateway_pb2.GenerateStreamResponse(request_id=event.request_id, model=event.model)
                    track, kept = Track(running), event.kept
                    await tell_rates(event, context)
                case PromptScores():
                    response = gateway_pb2.GenerateStreamResponse(request_id=last.request_id, model=last.model)
                    response.prompt_logprobs.extend(await asyncio.to_thread(wire.scored_tokens, event.tokens))
                    response.event_id = event_id(last.request_id, track.seen) if kept else ""
                    yield response
                case Delta():
                    assert started is not None, "a delta before its start"
                    running -= event.finish_reason is not None
                    track.take(event.choice, event.length, event.finish_reason is not None)
                    if event.seen:
                        continue
                    last = wire.stream_response(started, event)
                    last.event_id = event_id(last.request_id, track.seen) if kept else ""
                    if running:  # the very last one leaves together with the usage
                        yield last
                        last = gateway_pb2.GenerateStreamResponse(request_id=last.request_id, model=last.model)
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

    async def Cancel(self, request: gateway_pb2.CancelRequest, context: Context) -> gateway_pb2.CancelResponse:
        if not request.request_id:
            raise invalid("request_id", "is required")
        await self._engine.cancel(request.request_id, caller=caller())
        return gateway_pb2.CancelResponse()

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


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """Operations for whoever runs the service."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def GetStatus(self, request: admin_pb2.GetStatusRequest, context: Context) -> admin_pb2.GetStatusResponse:
        return await self._engine.status()

    async def ChangeModel(
        self, request: admin_pb2.ChangeModelRequest, context: Context
    ) -> admin_pb2.ChangeModelResponse:
        models = await self._engine.change_model(request.action, request.name, request.source)
        return admin_pb2.ChangeModelResponse(models=models)

    async def ChangeExecutor(
        self, request: admin_pb2.ChangeExecutorRequest, context: Context
    ) -> admin_pb2.ChangeExecutorResponse:
        executors = await self._engine.change_executor(request.action, request.target)
        return admin_pb2.ChangeExecutorResponse(executors=executors)

    async def GetUsage(self, request: admin_pb2.GetUsageRequest, context: Context) -> admin_pb2.GetUsageResponse:
        rows = await self._engine.usage(request.first_day, request.last_day)
        chosen = [row for row in rows if request.tenant in ("", row.tenant)]
        return admin_pb2.GetUsageResponse(rows=map(wire.usage_row, chosen))


def _resumed(request: gateway_pb2.GenerateStreamRequest, choices: int) -> list[Seen] | None:
    """What the client has already, where it goes on with a stream; the input then carries that one's id."""
    if not request.last_event_id:
        return None
    request_id, seen = parse_event_id(request.last_event_id, choices)
    if request.input.request_id not in ("", request_id):
        raise invalid("last_event_id", f"is of request {request_id}, and not {request.input.request_id}")
    request.input.request_id = request_id
    return seen
