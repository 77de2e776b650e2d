"""Loading, unloading and reloading models on executors, and fetching tokenizers from them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator

import grpc

from quire.v1 import executor_pb2, scheduler_pb2, types_pb2
from services.common.errors import QuireError, Reason, from_rpc_error, invalid
from services.scheduler import epochs
from services.scheduler.executors import ExecutorLink
from services.scheduler.loop import SchedulerLoop
from services.scheduler.state import Executor

log = logging.getLogger("quire.scheduler")

LOAD_SECONDS = 3600.0
"""A model may have to be downloaded first."""
SETTLE_SECONDS = 30.0
"""After a load or unload the executor says so on its stream, and a new epoch begins."""


class ModelManager:
    """Changes models, one change at a time."""

    def __init__(self, loop: SchedulerLoop) -> None:
        self._loop = loop
        self._changing = asyncio.Lock()

    async def change(self, request: scheduler_pb2.ManageModelRequest) -> list[types_pb2.ModelDescription]:
        """Does what is asked and answers with the models after it. MODEL_NOT_FOUND, PRECONDITION, MODEL_LOAD_FAILED."""
        if not request.name:
            raise invalid("name", "must be set")
        async with self._changing:
            if request.action == scheduler_pb2.MODEL_ACTION_LOAD:
                await self._load(request.name, request.source)
            elif request.action == scheduler_pb2.MODEL_ACTION_UNLOAD:
                await self._unload(request.name)
            elif request.action == scheduler_pb2.MODEL_ACTION_RELOAD:
                await self._reload(request.name, request.source)
            else:
                raise invalid("action", "must be load, unload or reload")
        models = self._loop.state.models
        return [models[name].description for name in sorted(models)]

    async def fetch_tokenizer(self, fingerprint: str) -> AsyncIterator[bytes]:
        """The bundle's bytes, from an executor that has it. NOT_FOUND where none does."""
        for link in self._links:
            model = link.executor.model
            if link.executor.serves and model is not None and model.tokenizer_fingerprint == fingerprint:
                wanted = executor_pb2.FetchTokenizerRequest(tokenizer_fingerprint=fingerprint)
                try:
                    async for piece in link.stub.FetchTokenizer(wanted):
                        yield piece.data
                except grpc.RpcError as error:
                    raise from_rpc_error(error, Reason.EXECUTOR_LOST) from error
                return
        raise QuireError(Reason.NOT_FOUND, f"no executor has the tokenizer {fingerprint!r}")

    @property
    def _links(self) -> list[ExecutorLink]:
        return list(self._loop.executors.values())

    async def _load(self, name: str, source: str) -> None:
        if not source:
            raise invalid("source", "must be set to load a model")
        free = next((link for link in self._links if _is_free(link.executor)), None)
        if free is None:
            raise QuireError(
                Reason.PRECONDITION, "every connected executor holds a model; add an executor, or unload a model first"
            )
        await self._load_on(free, name, source)

    async def _unload(self, name: str) -> None:
        for link in self._holders(name):
            await self._unload_on(link)
        epochs.forget_model(self._loop.state, name, QuireError(Reason.MODEL_NOT_FOUND, f"model {name!r} was unloaded"))
        self._loop.kick()

    async def _reload(self, name: str, source: str) -> None:
        for link in self._holders(name):
            assert link.executor.model is not None
            origin = source or link.executor.model.source
            await self._unload_on(link)
            await self._load_on(link, name, origin)

    def _holders(self, name: str) -> list[ExecutorLink]:
        holders = [
            link
            for link in self._links
            if link.executor.connected and link.executor.model is not None and link.executor.model.name == name
        ]
        if not holders:
            raise QuireError(Reason.MODEL_NOT_FOUND, f"name: no executor holds {name!r}", field="name")
        return holders

    async def _load_on(self, link: ExecutorLink, name: str, source: str) -> None:
        request = executor_pb2.LoadModelRequest(name=name, source=source)
        started = time.monotonic()
        try:
            response = await link.stub.LoadModel(request, timeout=LOAD_SECONDS)
        except grpc.RpcError as error:
            raise from_rpc_error(error, Reason.EXECUTOR_LOST) from error
        fingerprint = response.description.model.fingerprint
        await self._settled(link, fingerprint)
        log.info(
            "model loaded",
            extra={"model": name, "executor": link.executor.target, "seconds": time.monotonic() - started},
        )

    async def _unload_on(self, link: ExecutorLink) -> None:
        try:
            await link.stub.UnloadModel(executor_pb2.UnloadModelRequest(), timeout=LOAD_SECONDS)
        except grpc.RpcError as error:
            raise from_rpc_error(error, Reason.EXECUTOR_LOST) from error
        await self._settled(link, "")
        log.info("model unloaded", extra={"executor": link.executor.target})

    async def _settled(self, link: ExecutorLink, fingerprint: str) -> None:
        """Waits until the executor's stream speaks of that model ("" for none)."""
        executor = link.executor

        def holds() -> bool:
            present = executor.model.fingerprint if executor.model is not None else ""
            return executor.connected and not executor.stream_failure and present == fingerprint

        if not await self._loop.until(holds, SETTLE_SECONDS):
            raise QuireError(Reason.EXECUTOR_LOST, f"executor {executor.target} has not come back with its new model")


def _is_free(executor: Executor) -> bool:
    return executor.connected and executor.model is None and not executor.draining
