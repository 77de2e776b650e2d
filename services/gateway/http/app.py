"""The routes: each translates a request, asks the engine and translates the answer."""

from __future__ import annotations

import asyncio
import functools
from contextlib import aclosing
from typing import Any

from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import Response

import quire
from quire.v1.gateway_pb2 import EmbedRequest, GenerationInput
from quire.v1.types_pb2 import ModelDescription
from services.common.errors import QuireError
from services.gateway.embedding import Vector
from services.gateway.embedding import collect as collect_vector
from services.gateway.http.access import Access, ScopedRoute
from services.gateway.http.body import read_as
from services.gateway.http.chat import ChatSurface
from services.gateway.http.client_watch import ClientGone, ClientWatch
from services.gateway.http.completions import CompletionSurface
from services.gateway.http.default_budget import generate_within_context
from services.gateway.http.edge import LAST_EVENT, Edge
from services.gateway.http.embeddings import NAMES as EMBEDDING_NAMES
from services.gateway.http.embeddings import check_dimensions, embed_all, render, requests_of
from services.gateway.http.encoding import JsonResponse
from services.gateway.http.errors import HttpError, bad_request, error_response, from_exception, renaming
from services.gateway.http.fanout import collect, merge
from services.gateway.http.messages import MessagesSurface
from services.gateway.http.messages_body import MessagesRequest, TokenCountRequest, count_job, messages_job
from services.gateway.http.openapi import body_of, describe
from services.gateway.http.ports import Engine, Generation, HttpSettings
from services.gateway.http.responses import ResponsesSurface
from services.gateway.http.responses_body import ResponsesRequest, responses_job
from services.gateway.http.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    TokenizeRequest,
)
from services.gateway.http.streaming import EventStream, chunks, rate_headers
from services.gateway.http.surface import Surface
from services.gateway.http.timing import Timing, header_parameters, read_timing
from services.gateway.http.to_input import NAMES, Job, chat_job, completion_job, tokenize_prompt
from services.gateway.http.tools import names_of
from services.gateway.identity import Identity
from services.gateway.positions import MOST_CHARACTERS, Seen, parse_event_id

HEADERS = [
    *header_parameters(),
    {
        "name": LAST_EVENT,
        "in": "header",
        "description": "Id of the last event of the same request's stream that came: the answer begins behind it.",
        "schema": {"type": "string", "maxLength": MOST_CHARACTERS},
    },
]

BODIES: list[type[BaseModel]] = [
    CompletionRequest,
    ChatRequest,
    ResponsesRequest,
    MessagesRequest,
    TokenCountRequest,
    EmbeddingRequest,
    TokenizeRequest,
    DetokenizeRequest,
]


def create_app(engine: Engine, identity: Identity, settings: HttpSettings) -> FastAPI:
    """The ASGI application over an engine."""
    app = FastAPI(title="Quire", version=quire.__version__, docs_url=None, redoc_url=None)
    app.router.route_class = ScopedRoute
    app.add_middleware(Access, identity=identity)
    app.add_middleware(Edge)  # outermost
    app.exception_handler(HttpError)(_tell)
    app.exception_handler(QuireError)(_tell)
    app.exception_handler(ClientGone)(_nobody_left)
    app.exception_handler(HTTPException)(_tell_routing)
    describe(app, BODIES)
    limit = settings.max_body_bytes

    @app.get("/health")
    async def health() -> Response:
        """200 when requests can be answered, else 503."""
        return JsonResponse({"status": "ready"}) if engine.ready else JsonResponse({"status": "not ready"}, 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        """What the gateway measures, as Prometheus reads it."""
        return Response(engine.metrics(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        found = engine.models(request.state.caller)
        return JsonResponse({"object": "list", "data": [_model(model) for model in found]})

    @app.get("/v1/models/{name:path}")
    async def model(request: Request, name: str) -> Response:
        for one in engine.models(request.state.caller):
            if one.name == name:
                return JsonResponse(_model(one))
        raise HttpError(404, f"model: no model is named {name[:256]!r}", "model_not_found", "model")

    @app.post("/v1/completions", openapi_extra=body_of(CompletionRequest) | {"parameters": HEADERS})
    async def completions(request: Request) -> Response:
        timing = read_timing(request.headers, asyncio.get_running_loop().time())
        job = await read_as(request, CompletionRequest, completion_job, limit)
        return await _answer(engine, request, job, timing, CompletionSurface(request.state.request_id, job))

    @app.post("/v1/chat/completions", openapi_extra=body_of(ChatRequest) | {"parameters": HEADERS})
    async def chat_completions(request: Request) -> Response:
        timing = read_timing(request.headers, asyncio.get_running_loop().time())
        job = await read_as(request, ChatRequest, chat_job, limit)
        return await _answer(engine, request, job, timing, ChatSurface(request.state.request_id, job))

    @app.post("/v1/embeddings", openapi_extra=body_of(EmbeddingRequest) | {"parameters": header_parameters()})
    async def embeddings(request: Request) -> Response:
        timing = read_timing(request.headers, asyncio.get_running_loop().time())
        body = await read_as(request, EmbeddingRequest, lambda body: body, limit)
        return await _embed(engine, request, body, timing)

    @app.post("/v1/responses", openapi_extra=body_of(ResponsesRequest) | {"parameters": HEADERS})
    async def responses(request: Request) -> Response:
        timing = read_timing(request.headers, asyncio.get_running_loop().time())
        body, job = await read_as(request, ResponsesRequest, responses_job, limit)
        return await _answer(engine, request, job, timing, ResponsesSurface(request.state.request_id, body))

    @app.post("/v1/messages", openapi_extra=body_of(MessagesRequest) | {"parameters": HEADERS})
    async def messages(request: Request) -> Response:
        timing = read_timing(request.headers, asyncio.get_running_loop().time())
        _, job = await read_as(request, MessagesRequest, messages_job, limit)
        return await _answer(engine, request, job, timing, MessagesSurface(request.state.request_id, job))

    @app.post("/v1/messages/count_tokens", openapi_extra=body_of(TokenCountRequest))
    async def count_tokens(request: Request) -> Response:
        job = await read_as(request, TokenCountRequest, count_job, limit)
        [one] = job.inputs
        with renaming(job.names):
            ids, _ = await engine.tokenize(one.model, one.chat, caller=request.state.caller)
        return JsonResponse({"input_tokens": len(ids)})

    @app.delete("/v1/streams/{request_id:path}")
    async def cancel(request: Request, request_id: str) -> Response:
        """Ends a running request at once, where it would wait for its client to come back. Its id is x-request-id."""
        await engine.cancel(request_id, caller=request.state.caller)
        return Response(status_code=204)

    @app.post("/tokenize", openapi_extra=body_of(TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        body, prompt = await read_as(request, TokenizeRequest, lambda body: (body, tokenize_prompt(body)), limit)
        special = body.add_special_tokens is not False
        with renaming(dict(NAMES) | names_of(body)):
            ids, model = await engine.tokenize(body.model, prompt, caller=request.state.caller, add_special=special)
        return JsonResponse({"count": len(ids), "max_model_len": model.context_length, "tokens": ids})

    @app.post("/detokenize", openapi_extra=body_of(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        body = await read_as(request, DetokenizeRequest, lambda body: body, limit)
        with renaming({"token_ids": "tokens"}):
            skip, caller = body.skip_special_tokens is not False, request.state.caller
            text = await engine.detokenize(body.model, body.tokens, caller=caller, skip_special=skip)
        return JsonResponse({"prompt": text})

    return app


async def _embed(engine: Engine, request: Request, body: EmbeddingRequest, timing: Timing) -> Response:
    """The vectors of all inputs; a client that goes ends them."""
    watch, caller = ClientWatch(request.receive), request.state.caller

    async def embed(one: EmbedRequest) -> Vector:
        deadline = timing.left(asyncio.get_running_loop().time())
        async with aclosing(engine.embed(one, caller=caller, deadline=deadline, on_cut=watch.cut)) as events:
            return await collect_vector(events)

    with renaming(EMBEDDING_NAMES):
        if body.dimensions is not None:
            check_dimensions(body, engine.model(body.model, caller))
        vectors = await watch.run(embed_all(requests_of(body, request.state.request_id), embed))
    # Thousands of numbers each: their rendering must not delay the streams beside it.
    return await asyncio.to_thread(lambda: JsonResponse(render(body, vectors), headers=vectors[-1].headers))


async def _answer(engine: Engine, request: Request, job: Job, timing: Timing, surface: Surface) -> Response:
    """Runs a job; a client that goes ends it. What fails before the first event keeps its status."""
    watch = ClientWatch(request.receive)
    request_id = request.state.request_id
    with renaming(job.names):
        seen = _resumed(request, job)
    for index, one in enumerate(job.inputs):
        one.request_id = request_id if len(job.inputs) == 1 else f"{request_id}-{index}"
        one.target_first_token_ms, one.target_token_gap_ms = timing.first_token_ms, timing.token_gap_ms

    def generate(index: int, one: GenerationInput) -> Generation:
        deadline = timing.left(asyncio.get_running_loop().time())
        each = job.choices_per_prompt
        part = None if seen is None else seen[index * each : (index + 1) * each]
        return engine.generate(one, caller=request.state.caller, deadline=deadline, on_cut=watch.cut, seen=part)

    begins = [functools.partial(generate, index) for index in range(len(job.inputs))]
    if job.default_budget:
        events = merge([generate_within_context(begin, one) for begin, one in zip(begins, job.inputs, strict=True)])
    else:
        events = merge([begin(one) for begin, one in zip(begins, job.inputs, strict=True)])
    with renaming(job.names):
        if job.stream:
            first = await watch.run(anext(events))
            data = chunks(first, events, surface, job, request_id, resumed=seen is not None)
            return EventStream(data, watch, rate_headers(first[1]))
        async with aclosing(events):
            answers = await watch.run(collect(events, len(job.inputs), job.choices_per_prompt))
    rates = answers[-1].started.headers
    if any(answer.prompt_scores is not None for answer in answers):
        # A long prompt's scores are large: their rendering must not delay the streams beside it.
        return await asyncio.to_thread(lambda: JsonResponse(surface.whole(answers), headers=rates))
    return JsonResponse(surface.whole(answers), headers=rates)


def _resumed(request: Request, job: Job) -> list[Seen] | None:
    """What the client has of each choice already, where it goes on with a stream that broke."""
    last = request.headers.get(LAST_EVENT, "")
    if not last:
        return None
    if not job.stream:
        raise bad_request(LAST_EVENT, "needs stream to be true")
    request_id, seen = parse_event_id(last, len(job.inputs) * job.choices_per_prompt)
    if request_id != request.state.request_id:
        raise bad_request(LAST_EVENT, f"is of request {request_id}, and not {request.state.request_id}")
    return seen


def _model(model: ModelDescription) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.loaded_at,
        "owned_by": "quire",
        "max_model_len": model.context_length,
        **({"members": list(model.members)} if model.members else {}),
    }


async def _tell(request: Request, error: Exception) -> Response:
    return error_response(from_exception(error, NAMES), request.url.path, request.state.request_id)


async def _tell_routing(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = "not_found" if error.status_code == 404 else "method_not_allowed"
    refusal = HttpError(error.status_code, f"{request.method} {request.url.path}: {error.detail}", code)
    response = error_response(refusal, request.url.path, request.state.request_id)
    response.headers.update(error.headers or {})
    return response


async def _nobody_left(request: Request, error: Exception) -> Response:
    return Response(status_code=499)
