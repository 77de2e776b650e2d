"""The scheduler's side of each executor's Run stream."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import grpc

from quire.v1 import executor_pb2, executor_pb2_grpc
from services.common.errors import QuireError, Reason
from services.scheduler import epochs
from services.scheduler.apply import apply
from services.scheduler.link import Link
from services.scheduler.state import Executor, State

log = logging.getLogger("quire.scheduler")


class ExecutorLink:
    """One executor: its Run stream and its unary calls. Owns the channel."""

    def __init__(
        self, state: State, executor: Executor, channel: grpc.aio.Channel, scheduler_id: str, kick: Callable[[], None]
    ) -> None:
        self.executor = executor
        self.stub: executor_pb2_grpc.ExecutorServiceAsyncStub = executor_pb2_grpc.ExecutorServiceStub(channel)
        self._state, self._channel, self._scheduler_id, self._kick = state, channel, scheduler_id, kick
        name = f"executor {executor.target}"
        self._link: Link[executor_pb2.RunRequest, executor_pb2.RunResponse] = Link(
            name, self.stub.Run, self, Reason.EXECUTOR_LOST
        )
        self._running: asyncio.Task[None] | None = None

    def start(self, group: asyncio.TaskGroup) -> None:
        """Keeps a stream open until `stop`."""
        self._running = group.create_task(self._link.run())

    async def stop(self) -> None:
        """Ends the stream for good, and the channel. The executor is not told lost: whoever stops it knows."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait({self._running})
        await self._channel.close()

    def send(self, plan: executor_pb2.StepPlan) -> None:
        self._link.send(executor_pb2.RunRequest(plan=plan))

    def drop_failed(self) -> None:
        """Opens a new stream, and with it a new epoch, where the present one cannot go on."""
        if self.executor.stream_failure:
            self._link.drop(QuireError(Reason.EXECUTOR_LOST, self.executor.stream_failure))

    def hello(self) -> executor_pb2.RunRequest:
        # No earlier epoch is named: its sequences are in the queue with all tokens that were seen.
        return executor_pb2.RunRequest(hello=executor_pb2.RunHello(scheduler_id=self._scheduler_id))

    def opened(self, first: executor_pb2.RunResponse) -> None:
        if first.WhichOneof("message") != "welcome":
            raise QuireError(Reason.PROTOCOL, "the first message of Run is a welcome")
        welcome = first.welcome
        known_problems = self._state.alias_problems
        epochs.executor_opened(self._state, self.executor, welcome.epoch, welcome.description, time.monotonic())
        for problem in self._state.alias_problems:
            if problem not in known_problems:
                log.error(problem)
        self._kick()

    def received(self, message: executor_pb2.RunResponse) -> None:
        kind = message.WhichOneof("message")
        if kind == "results":
            apply(self._state, self.executor, message.results, time.monotonic())
        elif kind == "description":
            # Another model, or none: what runs and what is under way belongs to the past. A new epoch says so to all.
            self.executor.stream_failure = "the executor's model changed"
        elif kind == "drain":
            epochs.executor_ending(self.executor, message.drain.remaining_seconds, time.monotonic())
            log.info("executor drains", extra={"executor": self.executor.target, "running": len(self.executor.running)})
        else:
            raise QuireError(Reason.PROTOCOL, f"unexpected {kind} on Run")
        self._kick()

    def lost(self, error: QuireError) -> None:
        if self.executor.connected:
            epochs.executor_lost(self._state, self.executor, time.monotonic())
            self._kick()
