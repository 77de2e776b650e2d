"""The one stream to the scheduler: stays open, sends what changed, hands on what comes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

import grpc

from quire.v1 import scheduler_pb2, scheduler_pb2_grpc, types_pb2
from services.common.backoff import Backoff
from services.common.errors import QuireError
from services.gateway.dispatch import Dispatch
from services.gateway.requests import OpenRequest, RequestTable

log = logging.getLogger("quire.gateway.link")

Call = grpc.aio.StreamStreamCall[scheduler_pb2.ServeRequest, scheduler_pb2.ServeResponse]


class SchedulerLink:
    """Owns the Serve stream, and tells it what `Dispatch` decides."""

    def __init__(
        self,
        stub: scheduler_pb2_grpc.SchedulerServiceAsyncStub,
        gateway_id: str,
        table: RequestTable,
        resume_seconds: float,
        hold_tokens: int,
        on_models: Callable[[list[types_pb2.ModelDescription]], None],
        on_state: Callable[[], None],
    ) -> None:
        """`on_models` gets the list of models whenever it changes; `on_state` hears of connection and loss.

        The others are those of `Dispatch`.
        """
        self._stub, self._gateway_id, self._table = stub, gateway_id, table
        self._on_models, self._on_state = on_models, on_state
        self._dispatch, self._wake = Dispatch(table, resume_seconds, hold_tokens), asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def connected(self) -> bool:
        return self._dispatch.connected

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="scheduler-link")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    # What the gateway tells; see Dispatch.

    def submit(self, request: OpenRequest) -> None:
        self._dispatch.submit(request, _now())
        self._write_soon()

    def cancel(self, request: OpenRequest) -> None:
        self._dispatch.cancel(request)
        self._write_soon()

    def forget(self, request: OpenRequest) -> None:
        self._dispatch.forget(request)

    def stop_at(self, request: OpenRequest, choice: int, length: int) -> None:
        self._dispatch.stop_at(request, choice, length)
        self._write_soon()

    def hold(self, request: OpenRequest, held: bool) -> None:
        self._dispatch.hold(request, held)
        self._write_soon()

    def expire(self, now: float) -> None:
        self._dispatch.expire(now)

    # The stream.

    async def _run(self) -> None:
        backoff = Backoff()
        while True:
            try:
                await self._serve()
                reason = "the stream was closed"
            except grpc.aio.AioRpcError as error:
                reason = f"{error.code().name}: {error.details()}"
            except QuireError as error:
                reason = error.message
            except Exception as error:
                log.exception("unexpected error on the scheduler's stream")
                reason = repr(error)
            if self.connected:
                backoff.reset()
            self._lose(reason)
            await backoff.pause()

    async def _serve(self) -> None:
        """One stream from hello to its end."""
        call: Call = self._stub.Serve(wait_for_ready=True)
        writer: asyncio.Task[None] | None = None
        try:
            await call.write(scheduler_pb2.ServeRequest(gateway_id=self._gateway_id))
            while isinstance(message := await call.read(), scheduler_pb2.ServeResponse):
                self._apply(message)
                if writer is None:
                    writer = asyncio.create_task(self._write(call), name="scheduler-link-writer")
                    self._connect()
        finally:
            call.cancel()
            if writer is not None:
                writer.cancel()
                await asyncio.wait([writer])

    async def _write(self, call: Call) -> None:
        with contextlib.suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):  # the reader tells of the loss
            while True:
                await self._wake.wait()
                self._wake.clear()
                while self._dispatch.outbox:
                    await call.write(self._dispatch.outbox.take(_now()))

    def _write_soon(self) -> None:
        if self._dispatch.outbox:
            self._wake.set()

    def _apply(self, message: scheduler_pb2.ServeResponse) -> None:
        if message.models_changed:
            self._on_models(list(message.models))
        self._dispatch.apply(message, _now())
        self._write_soon()

    def _connect(self) -> None:
        log.info("scheduler connected", extra={"models": sorted(self._dispatch.models)})
        self._dispatch.connect()
        self._write_soon()
        self._on_state()

    def _lose(self, reason: str) -> None:
        if self.connected:
            log.warning("scheduler lost", extra={"reason": reason, "open_requests": len(self._table)})
        self._dispatch.lose(_now())
        self._on_state()


def _now() -> float:
    return asyncio.get_running_loop().time()
