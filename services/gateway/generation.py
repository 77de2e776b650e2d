"""One generation as its reader sees it: an iterator of events that ends cleanly only with a finish reason."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable

from services.common.errors import QuireError, Reason
from services.gateway.events import Event
from services.gateway.reading import Reading
from services.gateway.stream import Stream


class Generation(AsyncIterator[Event]):
    """Events of one request. `cancel()` ends the reading at any time, and so does cancelling a pending `anext`."""

    def __init__(
        self, opening: Callable[[], Awaitable[tuple[Stream, Reading]]], on_cut: Callable[[], None] | None
    ) -> None:
        self._opening, self._on_cut = opening, on_cut
        self._stream: Stream | None = None
        self._reading: Reading | None = None
        self._events: deque[Event] = deque()
        self._waiting = self._cut = False
        self._left_at = 0.0  # when the reader went away with its last event
        self._error: QuireError | None = None
        self.closed = False
        self.gone = False  # nothing is to be told to this reader any more

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> Event:
        self._waiting = True
        try:
            if self._reading is None and not self.closed:
                await self._open()
            while not self._events:
                if self.closed or self._reading is None or self._stream is None:
                    self.gone = True
                    raise self._error or StopAsyncIteration
                await self._reading.changed()
                if not self.closed:
                    self._advance(self._stream, self._reading)
            return self._events.popleft()
        except asyncio.CancelledError:
            self.cancel()
            raise
        finally:
            self._waiting = False
            self._left_at = asyncio.get_running_loop().time()

    def cancel(self) -> None:
        """Ends the reading, and with it the request where nobody else reads it. Idempotent."""
        self.gone = True
        self._leave(QuireError(Reason.CANCELLED, "the request was cancelled"))

    async def aclose(self) -> None:
        """As `cancel`, for `contextlib.aclosing`."""
        self.cancel()

    @property
    def done(self) -> bool:
        """Whether it needs no looking after any more."""
        return self.gone or (self.closed and not self._cut)

    def stalled(self, now: float) -> float:
        """Seconds for which the reader has left something unread."""
        if self._waiting or self.done or self._reading is None:
            return 0.0
        left = self._events or self._cut or self._reading.unread or self._reading.request.complete
        return now - self._left_at if left else 0.0

    def cut(self) -> None:
        """Ends the reading of a client that stalled; it meets SLOW_READER when it comes back. Idempotent."""
        if self._stream is None or self._reading is None or self._cut:
            return
        self._cut = self.closed = True
        self._events.clear()
        self._error = QuireError(Reason.SLOW_READER, "the client left its tokens unread too long")
        self._stream.cut(self._reading, self._error)

    def abandon(self) -> None:
        """Gives a reader up that was cut and did not come back."""
        self.gone = True
        if self._on_cut is not None:
            self._on_cut()

    async def _open(self) -> None:
        try:
            self._stream, self._reading = await self._opening()
        except QuireError as error:
            self.closed, self._error = True, error
            raise
        if self.closed:  # cancelled meanwhile
            self._stream.leave(self._reading)

    def _advance(self, stream: Stream, reading: Reading) -> None:
        """Takes what is new; an error comes behind the tokens before it."""
        self._events.extend(stream.advance(reading))
        if reading.finished:
            self._leave(None)
        elif reading.request.error is not None:
            self._leave(reading.request.error)

    def _leave(self, error: QuireError | None) -> None:
        """Reads no more; behind the events that wait to be read the reader meets the error, if any."""
        if self.closed:
            return
        self.closed, self._error = True, error
        if self._stream is not None and self._reading is not None:
            self._stream.leave(self._reading)
            self._reading.wake()  # a reader that waits meets the error
