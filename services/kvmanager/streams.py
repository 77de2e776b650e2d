"""One stream of a peer: ordered writing from several tasks, and an end that the other side is told of."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, Generic, TypeVar

import grpc

from services.common.errors import QuireError

log = logging.getLogger("quire.kvmanager")

Request = TypeVar("Request")
Response = TypeVar("Response")


class PeerStream(Generic[Request, Response]):
    """Reads until the peer ends, or until `close` ends the stream with an error."""

    def __init__(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        self._context = context
        self._outbox: deque[Callable[[], Response | None]] = deque()
        self._writing = asyncio.Lock()
        self._closed: asyncio.Future[QuireError] = asyncio.get_running_loop().create_future()

    async def send(self, make: Callable[[], Response | None]) -> None:
        """Writes one message, made when its turn comes so that it states what holds then; None writes nothing."""
        self._outbox.append(make)
        await self._write()

    def push(self, make: Callable[[], Response | None]) -> Coroutine[Any, Any, None]:
        """As `send`, for what no request asked for; its turn is that of this call, whenever the rest is awaited.

        Where the peer is already leaving, its reader says so.
        """
        self._outbox.append(make)
        return self._write_pushed()

    async def _write_pushed(self) -> None:
        try:
            await self._write()
        except Exception as error:
            log.debug("push not written", extra={"error": repr(error)})

    async def _write(self) -> None:
        """Writes whatever waits: messages leave in the order in which they were asked for, whoever writes them."""
        async with self._writing:
            while self._outbox:
                make = self._outbox.popleft()
                message = None if self._closed.done() else make()
                if message is not None:
                    await self._context.write(message)

    def close(self, error: QuireError) -> None:
        """Ends the stream with a status. Nothing is read or written after it."""
        if not self._closed.done():
            self._closed.set_result(error)

    async def serve(self, requests: AsyncIterator[Request], handle: Callable[[Request], Awaitable[None]]) -> None:
        """Handles each request in order; returns when the peer ended the stream, raises what ended it otherwise."""

        async def read() -> None:
            async for request in requests:
                if self._closed.done():
                    return
                await handle(request)

        reader = asyncio.create_task(read())
        reader.add_done_callback(lambda task: task.cancelled() or task.exception())  # `_closed` may say why instead
        ends: list[asyncio.Future[Any]] = [reader, self._closed]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not reader.done():
                reader.cancel()
        if self._closed.done():
            raise self._closed.result()
        self._closed.cancel()
        await reader
