"""ExecutorService: translates calls to the engine and its answers back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from quire.v1 import executor_pb2, executor_pb2_grpc, types_pb2
from services.common.errors import QuireError, Reason, invalid
from services.executor.engine import Engine, Session

CHUNK_BYTES = 1 << 20

Context = grpc.aio.ServicerContext[Any, Any]


class ExecutorServicer(executor_pb2_grpc.ExecutorServiceServicer):
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def Run(
        self, request_iterator: AsyncIterator[executor_pb2.RunRequest], context: Context
    ) -> AsyncIterator[executor_pb2.RunResponse]:
        first = await anext(request_iterator, None)
        if first is None or first.WhichOneof("message") != "hello":
            raise QuireError(Reason.PROTOCOL, "the first message of Run is a hello")
        # Shielded: half an opening would leave the older stream without a word.
        session = await asyncio.shield(self._engine.open(first.hello))
        reading = asyncio.create_task(self._read(request_iterator, session))
        try:
            yield executor_pb2.RunResponse(
                welcome=executor_pb2.RunWelcome(epoch=session.epoch, description=self._engine.description)
            )
            while True:
                outgoing = await session.outgoing.get()
                if outgoing is None:
                    return
                if isinstance(outgoing, QuireError):
                    raise outgoing
                if isinstance(outgoing, types_pb2.ExecutorDescription):
                    yield executor_pb2.RunResponse(description=outgoing)
                elif isinstance(outgoing, executor_pb2.RunDrain):
                    yield executor_pb2.RunResponse(drain=outgoing)
                else:
                    yield executor_pb2.RunResponse(results=outgoing)
        finally:
            reading.cancel()
            self._engine.close(session)

    async def _read(self, requests: AsyncIterator[executor_pb2.RunRequest], session: Session) -> None:
        async for request in requests:
            if request.WhichOneof("message") != "plan":
                session.outgoing.put_nowait(QuireError(Reason.PROTOCOL, "after its hello a stream carries plans"))
                return
            self._engine.worker.submit(session.epoch, request.plan)
        session.outgoing.put_nowait(None)

    async def Describe(self, request: executor_pb2.DescribeRequest, context: Context) -> executor_pb2.DescribeResponse:
        return executor_pb2.DescribeResponse(
            description=self._engine.description,
            epoch=self._engine.epoch,
            sequence_count=self._engine.sequence_count,
        )

    async def FetchTokenizer(
        self, request: executor_pb2.FetchTokenizerRequest, context: Context
    ) -> AsyncIterator[executor_pb2.FetchTokenizerResponse]:
        model = self._engine.model
        if model is None or model.tokenizer_fingerprint != request.tokenizer_fingerprint:
            raise QuireError(Reason.NOT_FOUND, f"no tokenizer {request.tokenizer_fingerprint!r} is held here")
        bundle = model.tokenizer_bundle
        for start in range(0, len(bundle), CHUNK_BYTES):
            yield executor_pb2.FetchTokenizerResponse(data=bundle[start : start + CHUNK_BYTES])

    async def LoadModel(
        self, request: executor_pb2.LoadModelRequest, context: Context
    ) -> executor_pb2.LoadModelResponse:
        if not request.source:
            raise invalid("source", "must be set")
        # Shielded: a caller that leaves must not stop a load half-way.
        await asyncio.shield(self._engine.load(request.name, request.source))
        return executor_pb2.LoadModelResponse(description=self._engine.description)

    async def UnloadModel(
        self, request: executor_pb2.UnloadModelRequest, context: Context
    ) -> executor_pb2.UnloadModelResponse:
        await asyncio.shield(self._engine.unload())
        return executor_pb2.UnloadModelResponse(description=self._engine.description)
