"""Keeps the kvmanager informed: registration, inventory when it asks, epochs, operations done, last step.

One Report stream, opened again with growing pauses when it breaks. Between messages it sleeps.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from typing import NamedTuple, Protocol

import grpc

from quire.v1 import executor_pb2, kvmanager_pb2, kvmanager_pb2_grpc, types_pb2
from services.common.backoff import NAMED_ABSENCES, Backoff
from services.executor.results import Results

log = logging.getLogger("quire.executor")

STEP_PERIOD = 1.0
"""Seconds between reports of nothing but steps."""
MOST_KEPT = 4096
"""Closed epochs and ended operations that a new registration repeats."""


class Reporter(Protocol):
    """An executor, as far as the kvmanager must know of it."""

    async def registration(self) -> types_pb2.ExecutorDescription:
        """What it is, once no block is written but by steps: a kvmanager that has restarted knows of no move."""
        ...

    def registered(self, response: kvmanager_pb2.ReportResponse) -> None:
        """The answer to a registration: blocks may be moved again."""
        ...

    async def inventory(self) -> list[executor_pb2.SealedBlock]:
        """Which blocks hold what content now."""
        ...


class EndedOperation(NamedTuple):
    """A block operation, and whether its destination holds the content."""

    operation_id: int
    is_done: bool


class KvLink:
    """Lives on the event loop. `connect` gives a channel; without one nothing is reported."""

    def __init__(self, connect: Callable[[], grpc.aio.Channel] | None) -> None:
        self._connect = connect
        self._reporter: Reporter | None = None
        self._task: asyncio.Task[None] | None = None
        self._news = asyncio.Event()
        self._soon = asyncio.Event()  # news that should not wait for the period
        self._unregistered = True
        self._unanswered = False  # a registration was sent
        self._asked = self._stated = 0  # the last inventories that were wanted and stated on this stream, by number
        self._stream = 0  # counts them
        self._epoch = 0
        self._last_step = 0
        self._closed: deque[int] = deque(maxlen=MOST_KEPT)
        self._unsent_closed: list[int] = []
        self._ended_operations: deque[EndedOperation] = deque(maxlen=MOST_KEPT)
        self._unsent_operations: list[EndedOperation] = []

    def start(self, reporter: Reporter) -> None:
        self._reporter = reporter
        if self._connect is not None:
            self._task = asyncio.create_task(self._keep_open(self._connect))

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})  # a cancellation of the caller must get through

    def epoch_opened(self, epoch: int, closed_epochs: Iterable[int]) -> None:
        self._epoch, self._last_step = epoch, 0
        self.epochs_closed(closed_epochs)

    def epochs_closed(self, epochs: Iterable[int]) -> None:
        """Nothing of these runs any more: no step, and no move of a block."""
        for epoch in epochs:
            self._closed.append(epoch)
            self._unsent_closed.append(epoch)
        self._wake_now()

    def registration_changed(self) -> None:
        """A model came or went: pools, and with them all content, are new."""
        self._unregistered = True
        self._wake_now()

    def progressed(self, results: Results) -> None:
        if results.epoch == self._epoch:
            self._last_step = results.last_step
        self._news.set()
        for operation_id in results.done_operation_ids:
            self.operation_ended(operation_id, True)

    def operation_ended(self, operation_id: int, is_done: bool) -> None:
        """`is_done`: the destination holds the content."""
        ended = EndedOperation(operation_id, is_done)
        self._ended_operations.append(ended)
        self._unsent_operations.append(ended)
        self._wake_now()

    def _wake_now(self) -> None:
        self._news.set()
        self._soon.set()

    async def _keep_open(self, connect: Callable[[], grpc.aio.Channel]) -> None:
        backoff, failures, patience = Backoff(), 0, NAMED_ABSENCES
        async with connect() as channel:
            stub = kvmanager_pb2_grpc.KvManagerServiceStub(channel)
            while True:
                self._unregistered, self._asked, self._stated = True, 0, 0
                self._stream += 1
                try:
                    async for response in stub.Report(self._requests(self._stream)):
                        self._answered(response)
                        if failures >= patience:
                            log.info("reporting to the kvmanager again")
                        failures, patience = 0, 1
                        backoff.reset()
                except grpc.aio.AioRpcError as error:
                    failures += 1
                    if failures == patience:  # named once
                        log.warning("the kvmanager is out of reach", extra={"why": error.details()})
                await backoff.pause()

    def _answered(self, response: kvmanager_pb2.ReportResponse) -> None:
        if self._unanswered and self._reporter is not None:
            self._unanswered = False
            self._reporter.registered(response)
        if response.ask > self._asked:
            self._asked = response.ask
            self._wake_now()

    async def _requests(self, stream: int) -> AsyncIterator[kvmanager_pb2.ReportRequest]:
        """gRPC still asks a stream that broke for its next message: the news are the present stream's alone."""
        while stream == self._stream:
            self._news.clear()
            self._soon.clear()
            yield await self._request()
            await self._news.wait()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._soon.wait(), STEP_PERIOD)

    async def _request(self) -> kvmanager_pb2.ReportRequest:
        request = kvmanager_pb2.ReportRequest()
        closed, self._unsent_closed = self._unsent_closed, []
        ended, self._unsent_operations = self._unsent_operations, []
        if self._unregistered and self._reporter is not None:
            self._unregistered = False
            request.description.CopyFrom(await self._reporter.registration())
            self._unanswered = True
            closed, ended = list(self._closed), list(self._ended_operations)
        elif self._asked > self._stated and self._reporter is not None:
            request.answers = self._stated = self._asked
            request.inventory.extend(await self._reporter.inventory())
        request.closed_epochs.extend(closed)
        request.epoch, request.last_step = self._epoch, self._last_step
        request.done_operation_ids.extend(operation.operation_id for operation in ended)
        request.failed_operation_ids.extend(operation.operation_id for operation in ended if not operation.is_done)
        return request
