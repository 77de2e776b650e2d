"""VllmEngine: routers such as SMG, which have a tokenizer of their own, speak it to engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from quire.v1 import gateway_pb2
from quire.v1.foreign import smg_common_pb2 as common
from quire.v1.foreign import vllm_engine_pb2 as vllm
from quire.v1.foreign import vllm_engine_pb2_grpc
from services.common.errors import QuireError, Reason
from services.common.limits import MAX_CHOICES
from services.gateway.calls import Calls, Context, tell_rates
from services.gateway.embedding import collect
from services.gateway.engine import Engine
from services.gateway.events import PromptScores, Started
from services.gateway.foreign.errors import naming
from services.gateway.foreign.vllm import describe
from services.gateway.foreign.vllm.answer import Answer
from services.gateway.foreign.vllm.kv_events import Copies
from services.gateway.foreign.vllm.request import NAMES, prompt_ids, to_input
from services.gateway.guard import caller

SERVER_TYPE = "vllm-grpc"
"""By which a router knows the protocol, not the engine."""


class VllmEngineServicer(vllm_engine_pb2_grpc.VllmEngineServicer):
    """The protocol names no model: a caller's requests are for the one that it can ask for."""

    def __init__(self, engine: Engine, calls: Calls) -> None:
        self._engine, self._calls = engine, calls

    async def Generate(self, request: vllm.GenerateRequest, context: Context) -> AsyncIterator[vllm.GenerateResponse]:
        with naming(NAMES):
            asked = to_input(request)
            answer = Answer(request, min(asked.choice_count, MAX_CHOICES))
            try:
                async for event in self._calls.generate(asked, context):
                    if isinstance(event, Started):
                        await tell_rates(event, context)
                    if isinstance(event, PromptScores):  # as large as the prompt is long
                        await asyncio.to_thread(list, answer.take(event))
                    else:
                        for message in answer.take(event):
                            yield message
            except QuireError as error:
                if error.reason is not Reason.CANCELLED or context.cancelled():
                    raise
                for message in answer.abort():
                    yield message

    async def Embed(self, request: vllm.EmbedRequest, context: Context) -> vllm.EmbedResponse:
        with naming(NAMES):
            asked = gateway_pb2.EmbedRequest(request_id=request.request_id, token_ids=prompt_ids(request.tokenized))
            vector = await collect(self._calls.embed(asked, context))
        return vllm.EmbedResponse(
            embedding=vector.values, prompt_tokens=vector.prompt_tokens, embedding_dim=len(vector.values)
        )

    async def HealthCheck(self, request: vllm.HealthCheckRequest, context: Context) -> vllm.HealthCheckResponse:
        ready = self._engine.ready
        return vllm.HealthCheckResponse(healthy=ready, message="ready" if ready else "not ready")

    async def Abort(self, request: vllm.AbortRequest, context: Context) -> vllm.AbortResponse:
        self._engine.abort(frozenset(request.request_ids), caller())
        return vllm.AbortResponse()

    async def GetModelInfo(self, request: vllm.GetModelInfoRequest, context: Context) -> vllm.GetModelInfoResponse:
        return describe.model_info(self._engine.model("", caller()))

    async def GetServerInfo(self, request: vllm.GetServerInfoRequest, context: Context) -> vllm.GetServerInfoResponse:
        return vllm.GetServerInfoResponse(
            active_requests=self._engine.open_requests,
            uptime_seconds=self._engine.uptime,
            server_type=SERVER_TYPE,
            data_parallel_size=1,
        )

    async def GetLoads(self, request: vllm.GetLoadsRequest, context: Context) -> vllm.GetLoadsResponse:
        return describe.loads((await self._engine.status()).scheduler)

    async def GetTokenizer(
        self, request: common.GetTokenizerRequest, context: Context
    ) -> AsyncIterator[common.GetTokenizerChunk]:
        asking = caller()
        model = self._engine.model("", asking)
        last: bytes | None = None
        async for piece in self._engine.tokenizer_bundle(model, asking):
            if last is not None:
                yield common.GetTokenizerChunk(data=last)
            last = piece
        yield common.GetTokenizerChunk(data=last or b"", sha256=model.tokenizer_fingerprint)

    async def SubscribeKvEvents(
        self, request: common.SubscribeKvEventsRequest, context: Context
    ) -> AsyncIterator[common.KvEventBatch]:
        copies = Copies()
        with naming({}):
            async for batch in self._engine.kv_events(request.start_sequence_number):
                yield copies.translate(batch)
