"""The one stream to the scheduler: stays open, sends what changed, hands on what comes, submits again after a loss."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator

import grpc

from quire.v1 import scheduler_pb2, scheduler_pb2_grpc, types_pb2
from services.common.backoff import Backoff
from services.common.errors import QuireError, Reason
from services.gateway.outbox import Outbox
from services.gateway.requests import OpenRequest, RequestTable, Score

log = logging.getLogger("quire.gateway.link")

Call = grpc.aio.StreamStreamCall[scheduler_pb2.ServeRequest, scheduler_pb2.ServeResponse]


class SchedulerLink:
    """Owns the Serve stream. Requests that no scheduler has are parked until one with their model answers."""

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
        """A request with more than `hold_tokens` unread tokens is held until its reader took them.

        `on_models` gets the list of models whenever it changes; `on_state` hears of connection and loss.
        """
        self._stub, self._gateway_id, self._table = stub, gateway_id, table
        self._resume_seconds, self._hold_tokens = resume_seconds, hold_tokens
        self._on_models, self._on_state = on_models, on_state
        self._models: dict[str, types_pb2.ModelDescription] = {}
        self._outbox, self._wake = Outbox(), asyncio.Event()
        self._parked: dict[int, OpenRequest] = {}
        self._task: asyncio.Task[None] | None = None
        self.connected = False

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="scheduler-link")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    # What the gateway tells.

    def submit(self, request: OpenRequest) -> None:
        """Sends a request as soon as a scheduler with its model is there."""
        self._park(request)
        self._unpark()

    def cancel(self, request: OpenRequest) -> None:
        """Ends a request at the scheduler."""
        if self._parked.pop(request.handle, None) is None and self.connected:
            self._outbox.cancel(request.handle)
            self._wake.set()

    def forget(self, request: OpenRequest) -> None:
        """A request is complete: nothing is to be submitted again."""
        self._parked.pop(request.handle, None)

    def stop_at(self, request: OpenRequest, choice: int, length: int) -> None:
        """Ends a choice behind `length` output tokens."""
        if request.handle not in self._parked and self.connected:
            self._outbox.stop_at(request.handle, choice, length)
            self._wake.set()

    def hold(self, request: OpenRequest, held: bool) -> None:
        """Pauses or resumes a request. The state is kept and told again after a loss."""
        request.held = held
        if request.handle not in self._parked and self.connected:
            self._outbox.hold(request.handle, held)
            self._wake.set()

    def expire(self, now: float) -> None:
        """Fails parked requests that waited too long. Called regularly while requests are open."""
        for request in list(self._parked.values()):
            if request.parked_at is not None and now - request.parked_at >= self._resume_seconds:
                del self._parked[request.handle]
                what = f"no scheduler with model {request.model.name} came back in {self._resume_seconds:g} s"
                request.fail(QuireError(Reason.SCHEDULER_LOST, what))

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
                while self._outbox:
                    await call.write(self._outbox.take(asyncio.get_running_loop().time()))

    def _connect(self) -> None:
        log.info("scheduler connected", extra={"models": sorted(self._models)})
        self.connected = True
        self._unpark()
        self._on_state()

    def _lose(self, reason: str) -> None:
        if self.connected:
            log.warning("scheduler lost", extra={"reason": reason, "open_requests": len(self._table)})
        self.connected = False
        self._outbox = Outbox()
        for request in self._table:
            request.settle()
            if not request.complete and request.handle not in self._parked:
                self._park(request)
        self._on_state()

    def _park(self, request: OpenRequest) -> None:
        request.parked_at = asyncio.get_running_loop().time()
        self._parked[request.handle] = request

    def _unpark(self) -> None:
        """Submits parked requests whose model is there."""
        if not self.connected:
            return
        for request in list(self._parked.values()):
            present = self._models.get(request.model.name)
            if present is None:
                continue
            del self._parked[request.handle]
            request.parked_at = None
            if present.fingerprint != request.model.fingerprint:
                request.fail(QuireError(Reason.SCHEDULER_LOST, f"model {present.name} changed while it was away"))
                continue
            self._outbox.submit(request)
            if request.held:
                self._outbox.hold(request.handle, True)
        if self._outbox:
            self._wake.set()

    # What the scheduler tells.

    def _apply(self, message: scheduler_pb2.ServeResponse) -> None:
        if message.models_changed:
            self._models = {model.name: model for model in message.models}
            self._on_models(list(message.models))
            self._unpark()
        for started in message.started:
            if (request := self._table.get(started.handle)) is not None:
                request.start(started)
        scores = self._apply_logprobs(message.logprobs) if message.logprobs else {}
        now, offset = asyncio.get_running_loop().time(), 0
        ids = list(message.token_ids)
        columns = (message.handles, message.choices, message.positions, message.token_counts)
        if len({len(column) for column in columns}) != 1 or sum(message.token_counts) != len(ids):
            raise QuireError(Reason.PROTOCOL, "the scheduler sent columns of unequal length")
        for handle, choice, position, count in zip(*columns, strict=True):
            request = self._table.get(handle)
            if request is not None:
                new_scores = scores.get((handle, choice), [])
                with self._failing(request):
                    new_ids = ids[offset : offset + count]
                    request.accept_tokens(choice, position, new_ids, new_scores[:count], now)
                    if request.unread > self._hold_tokens and not request.held:
                        self.hold(request, True)
                del new_scores[:count]
            offset += count
        for ended in message.ended:
            if (request := self._table.get(ended.handle)) is not None:
                request.accept_end(ended)
                if request.error is not None:
                    self.cancel(request)  # what its other choices still hold

    def _apply_logprobs(self, entries: Iterable[scheduler_pb2.ChoiceLogprobs]) -> dict[tuple[int, int], list[Score]]:
        """Hands prompt scores on and returns the output's, by (handle, choice)."""
        output: dict[tuple[int, int], list[Score]] = {}
        for entry in entries:
            request = self._table.get(entry.handle)
            if request is None:
                continue
            with self._failing(request):
                if entry.prompt.chosen:
                    request.accept_prompt_scores(entry.prompt_start, unpack(entry.prompt))
                output.setdefault((entry.handle, entry.choice), []).extend(unpack(entry.output))
        return output

    @contextlib.contextmanager
    def _failing(self, request: OpenRequest) -> Iterator[None]:
        """Turns an error about one request into that request's end."""
        try:
            yield
        except QuireError as error:
            log.error("request failed", extra={"request_id": request.request_id, "error": error.message})
            request.fail(error)
            self.cancel(request)


def unpack(packed: types_pb2.TokenLogprobs) -> list[Score]:
    """Scores of consecutive tokens. Raises PROTOCOL where the arrays do not fit together."""
    count, width = len(packed.chosen), packed.top_count
    if not len(packed.ranks) == count or not len(packed.top_token_ids) == len(packed.top_logprobs) == count * width:
        raise QuireError(Reason.PROTOCOL, "log probabilities have unequal lengths")
    top = list(zip(packed.top_token_ids, packed.top_logprobs, strict=True))
    return [
        Score(chosen, rank, tuple(top[i * width : (i + 1) * width]))
        for i, (chosen, rank) in enumerate(zip(packed.chosen, packed.ranks, strict=True))
    ]
