"""The streams to the schedulers: each stays open, sends what changed, hands on what comes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping

import grpc

from quire.v1 import scheduler_pb2, scheduler_pb2_grpc, types_pb2
from services.common.backoff import Backoff
from services.common.errors import QuireError
from services.gateway.dispatch import Dispatch
from services.gateway.placing.placing import Placing, PlacingRules
from services.gateway.requests import OpenRequest

log = logging.getLogger("quire.gateway.link")

Call = grpc.aio.StreamStreamCall[scheduler_pb2.ServeRequest, scheduler_pb2.ServeResponse]

HELLO_SECONDS = 10.0
"""How long connecting and the first answer may take together."""


class SchedulerLinks:
    """All schedulers of this gateway, and what `Placing` decides about requests."""

    def __init__(
        self,
        stubs: Mapping[str, scheduler_pb2_grpc.SchedulerServiceAsyncStub],
        gateway_id: str,
        rules: PlacingRules,
        on_models: Callable[[list[types_pb2.ModelDescription]], None],
        on_state: Callable[[], None],
    ) -> None:
        """`stubs` by the schedulers' names. `on_models` gets all models that can be asked for whenever they may have
        changed; `on_state` hears of connection and loss.
        """
        self.placing = Placing(list(stubs), rules)
        self._on_models, self._on_state = on_models, on_state
        self._links = [
            SchedulerLink(self.placing, side, stub, gateway_id, self._changed, self._write_soon)
            for side, stub in zip(self.placing.sides, stubs.values(), strict=True)
        ]

    @property
    def connected(self) -> bool:
        return self.placing.connected

    def having(self, tokenizer: str) -> list[str]:
        """Schedulers that are there and have a model with that tokenizer, by name."""
        return [
            side.name
            for side in self.placing.sides
            if side.connected and any(model.tokenizer_fingerprint == tokenizer for model in side.models.values())
        ]

    def start(self) -> None:
        for link in self._links:
            link.start()

    async def stop(self) -> None:
        for link in self._links:
            await link.stop()

    # What the gateway asks for; see Placing.

    def check(self, model: str, priority: int) -> None:
        self.placing.check(model, priority, _now())

    def submit(self, request: OpenRequest) -> None:
        self.placing.submit(request, _now())
        self._write_soon()

    def cancel(self, request: OpenRequest) -> None:
        self.placing.cancel(request, _now())
        self._write_soon()

    def forget(self, request: OpenRequest) -> None:
        self.placing.forget(request, _now())

    def stop_at(self, request: OpenRequest, choice: int, length: int) -> None:
        self.placing.stop_at(request, choice, length)
        self._write_soon()

    def hold(self, request: OpenRequest, held: bool) -> None:
        self.placing.hold(request, held)
        self._write_soon()

    def expire(self, now: float) -> None:
        self.placing.expire(now)
        self._write_soon()

    def _write_soon(self) -> None:
        for link in self._links:
            link.write_soon()

    def _changed(self, models: bool) -> None:
        if models:
            self._on_models(list(self.placing.models.values()))
        self._write_soon()  # what one does not have any more, another one gets
        self._on_state()


class SchedulerLink:
    """Owns one Serve stream, and tells it what is in its outbox."""

    def __init__(
        self,
        placing: Placing,
        side: Dispatch,
        stub: scheduler_pb2_grpc.SchedulerServiceAsyncStub,
        gateway_id: str,
        on_change: Callable[[bool], None],
        on_moved: Callable[[], None],
    ) -> None:
        """`on_change` hears of connection and loss, and whether the models may be others.

        `on_moved`: what ended here may be for another scheduler now.
        """
        self._placing, self._side, self._stub, self._gateway_id = placing, side, stub, gateway_id
        self._on_change, self._on_moved, self._wake = on_change, on_moved, asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="scheduler-link")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def write_soon(self) -> None:
        if self._side.outbox:
            self._wake.set()

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
            except TimeoutError:
                reason = f"no answer within {HELLO_SECONDS:g} s"
            except Exception as error:
                log.exception("unexpected error on the scheduler's stream")
                reason = repr(error)
            if self._side.connected:
                backoff.reset()
            self._lose(reason)
            await backoff.pause()

    async def _serve(self) -> None:
        """One stream from hello to its end."""
        call: Call = self._stub.Serve(wait_for_ready=True)
        writer: asyncio.Task[None] | None = None
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                await call.write(scheduler_pb2.ServeRequest(gateway_id=self._gateway_id))
                message = await call.read()
            while isinstance(message, scheduler_pb2.ServeResponse):
                self._apply(message)
                if writer is None:
                    writer = asyncio.create_task(self._write(call), name="scheduler-link-writer")
                    self._connect()
                message = await call.read()
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
                while self._side.outbox:
                    await call.write(self._side.outbox.take(_now()))

    def _apply(self, message: scheduler_pb2.ServeResponse) -> None:
        self._side.apply(message, _now())
        if message.models_changed:
            self._on_change(True)
        elif message.ended:
            self._on_moved()
        self.write_soon()

    def _connect(self) -> None:
        log.info("scheduler connected", extra={"scheduler": self._side.name, "models": sorted(self._side.models)})
        self._placing.connect(self._side, _now())
        self.write_soon()
        self._on_change(False)

    def _lose(self, reason: str) -> None:
        if self._side.connected:
            log.warning("scheduler lost", extra={"scheduler": self._side.name, "reason": reason})
        self._placing.lose(self._side, _now())
        self._on_change(False)


def _now() -> float:
    return asyncio.get_running_loop().time()
