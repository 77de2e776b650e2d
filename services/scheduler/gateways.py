"""The scheduler's side of gateways' Serve streams."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable

from quire.v1 import scheduler_pb2
from services.common.errors import QuireError, Reason, invalid
from services.scheduler import requests
from services.scheduler.state import Gateway, State

log = logging.getLogger("quire.scheduler")


class GatewayStreams:
    """All gateways that are connected. What happens while a message is being written goes into the next one."""

    def __init__(self, state: State, kick: Callable[[], None]) -> None:
        self._state, self._kick = state, kick
        self._wakes: dict[Gateway, asyncio.Event] = {}
        self._ended = False

    def wake(self) -> None:
        """Lets those streams write that have something to say, and those end that were replaced."""
        for gateway, wake in self._wakes.items():
            if gateway.has_output or not gateway.open:
                wake.set()

    def end(self) -> None:
        """Ends all streams, once nothing runs any more: gateways look for the next scheduler."""
        self._ended = True
        for wake in self._wakes.values():
            wake.set()

    async def serve(
        self,
        incoming: AsyncIterator[scheduler_pb2.ServeRequest],
        write: Callable[[scheduler_pb2.ServeResponse], Awaitable[None]],
    ) -> None:
        """Serves one stream until the gateway closes it. Its requests end with it, or wait for somebody to attach."""
        first = await anext(incoming, None)
        if first is None:
            return
        if not first.gateway_id:
            raise invalid("gateway_id", "the first message must carry it")
        gateway = requests.open_gateway(self._state, first.gateway_id, time.monotonic())
        wake = self._wakes[gateway] = asyncio.Event()
        reading = asyncio.create_task(self._read(gateway, first, incoming))
        reading.add_done_callback(lambda _: wake.set())
        log.info("gateway connected", extra={"gateway": gateway.gateway_id})
        try:
            while self._goes_on(gateway, reading):
                if gateway.has_output:
                    await write(gateway.take_output())
                    if self._state.draining:
                        self._kick()  # the drain waits for this
                wake.clear()
                if not gateway.has_output and self._goes_on(gateway, reading):
                    await wake.wait()
            if self._ended:
                raise QuireError(Reason.DRAINING, "the scheduler has ended")
            if not gateway.open:
                raise QuireError(Reason.PRECONDITION, "a newer stream of this gateway took over")
            reading.result()
        finally:
            reading.cancel()
            del self._wakes[gateway]
            requests.close_gateway(self._state, gateway, time.monotonic())
            self._kick()
            log.info("gateway left", extra={"gateway": gateway.gateway_id})

    def _goes_on(self, gateway: Gateway, reading: asyncio.Task[None]) -> bool:
        return gateway.open and not reading.done() and not self._ended

    async def _read(
        self,
        gateway: Gateway,
        first: scheduler_pb2.ServeRequest,
        incoming: AsyncIterator[scheduler_pb2.ServeRequest],
    ) -> None:
        self._take(gateway, first)
        async for message in incoming:
            if message.gateway_id:
                raise QuireError(Reason.PROTOCOL, "gateway_id: only the first message carries it")
            self._take(gateway, message)

    def _take(self, gateway: Gateway, message: scheduler_pb2.ServeRequest) -> None:
        if gateway.open:
            requests.serve(self._state, gateway, message, time.monotonic())
            self._kick()
