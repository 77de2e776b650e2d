"""The scheduler's side of the kvmanager's Reserve stream."""

from __future__ import annotations

import time
from collections.abc import Callable

import grpc

from quire.v1 import kvmanager_pb2, kvmanager_pb2_grpc
from services.common.errors import QuireError, Reason
from services.scheduler import epochs, reserve, restate
from services.scheduler.link import Link
from services.scheduler.state import State


class KvLink:
    """The kvmanager: its Reserve stream and its unary calls."""

    def __init__(
        self, state: State, target: str, channel: grpc.aio.Channel, scheduler_id: str, kick: Callable[[], None]
    ) -> None:
        self.stub: kvmanager_pb2_grpc.KvManagerServiceAsyncStub = kvmanager_pb2_grpc.KvManagerServiceStub(channel)
        self._state, self._scheduler_id, self._kick = state, scheduler_id, kick
        self._link: Link[kvmanager_pb2.ReserveRequest, kvmanager_pb2.ReserveResponse] = Link(
            f"kvmanager {target}", self.stub.Reserve, self, Reason.KVMANAGER_LOST
        )
        self._opened_before = False

    async def run(self) -> None:
        """Keeps the stream open; never returns."""
        await self._link.run()

    def send(self, message: kvmanager_pb2.ReserveRequest) -> None:
        self._link.send(message)

    def hello(self) -> kvmanager_pb2.ReserveRequest:
        return kvmanager_pb2.ReserveRequest(hello=kvmanager_pb2.ReserveHello(scheduler_id=self._scheduler_id))

    def opened(self, first: kvmanager_pb2.ReserveResponse) -> None:
        if self._opened_before:
            for message in restate.restate(self._state):
                self.send(message)
        self._opened_before = True
        epochs.kvmanager_opened(self._state)
        self.received(first)

    def received(self, message: kvmanager_pb2.ReserveResponse) -> None:
        reserve.take(self._state, message, time.monotonic())
        self._kick()

    def lost(self, error: QuireError) -> None:
        epochs.kvmanager_lost(self._state, time.monotonic())
        self._kick()
