"""Keeps one bidirectional stream to a peer open: hello, messages both ways, back-off and reconnection."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any, Generic, Protocol, TypeVar

import grpc

from services.common.backoff import NAMED_ABSENCES, Backoff
from services.common.errors import QuireError, Reason, from_rpc_error

log = logging.getLogger("quire.scheduler")
Out = TypeVar("Out")
In = TypeVar("In")
In_contra = TypeVar("In_contra", contravariant=True)
Out_co = TypeVar("Out_co", covariant=True)


class Peer(Protocol[Out_co, In_contra]):
    """What a link's messages mean."""

    def hello(self) -> Out_co:
        """The first message of a new stream."""
        ...

    def opened(self, first: In_contra) -> None:
        """The peer's first message: the stream is up. Raises QuireError to drop it."""
        ...

    def received(self, message: In_contra) -> None:
        """Any later message. Raises QuireError to drop the stream."""
        ...

    def lost(self, error: QuireError) -> None:
        """A stream that was up is gone, or one could not be opened. Another is tried soon."""
        ...


class Link(Generic[Out, In]):
    """One stream after another, for ever. Writing never waits: messages queue until the transport takes them."""

    def __init__(self, name: str, call: Callable[[AsyncIterator[Out]], Any], peer: Peer[Out, In], gone: Reason) -> None:
        """`call` opens a stream over an iterator of requests; `gone` is the reason where the peer is not there."""
        self.name = name
        self._call, self._peer, self._gone = call, peer, gone
        self._outgoing: asyncio.Queue[Out | None] = asyncio.Queue()  # of the present stream; None ends it
        self._dropped: asyncio.Future[QuireError] | None = None
        self._up = False

    def send(self, message: Out) -> None:
        """Queues a message on the present stream."""
        self._outgoing.put_nowait(message)

    def drop(self, error: QuireError) -> None:
        """Ends the present stream; a new one is opened at once."""
        if self._dropped is not None and not self._dropped.done():
            self._dropped.set_result(error)

    async def run(self) -> None:
        """Never returns."""
        backoff = Backoff()
        absences = 0
        while True:
            error = await self._session()
            was_up, self._up = self._up, False
            dropped = self._dropped is not None and self._dropped.done()
            absences = 0 if was_up else absences + 1
            if dropped:
                log.info("opening a new stream to %s", self.name, extra={"why": error.message})
            elif was_up or absences == NAMED_ABSENCES:
                log.warning("no stream to %s", self.name, extra={"reason": error.reason.name, "error": error.message})
            self._peer.lost(error)
            if was_up:
                backoff.reset()
            if not dropped:
                await backoff.pause()

    async def _session(self) -> QuireError:
        """One stream from hello to its end; answers why it ended."""
        self._outgoing = asyncio.Queue()
        self._dropped = asyncio.get_running_loop().create_future()
        call = self._call(self._requests(self._outgoing))
        reading = asyncio.create_task(self._read(call))
        try:
            await asyncio.wait({reading, self._dropped}, return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                return self._dropped.result()
            if reading.cancelled():
                return QuireError(self._gone, "the stream was cancelled")
            return reading.result()
        finally:
            call.cancel()
            self._outgoing.put_nowait(None)  # gRPC asks for the next message even where the call has ended
            reading.cancel()
            await asyncio.wait({reading})  # a cancellation of this task must get through

    async def _read(self, call: Any) -> QuireError:
        try:
            async for message in call:
                if self._up:
                    self._peer.received(message)
                else:
                    self._peer.opened(message)
                    self._up = True
                    log.info("stream to %s is open", self.name)
            return QuireError(self._gone, "the peer closed the stream")
        except grpc.RpcError as error:
            return from_rpc_error(error, self._gone)
        except QuireError as error:
            return error

    async def _requests(self, outgoing: asyncio.Queue[Out | None]) -> AsyncIterator[Out]:
        yield self._peer.hello()
        while (message := await outgoing.get()) is not None:
            yield message
