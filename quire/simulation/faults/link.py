"""The client's end of a stream that is opened again and again, as the services' links do it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quire.simulation.faults.party import Party
from quire.simulation.faults.stream import CLIENT, Stream, Wires
from services.common.backoff import FIRST_SECONDS, LONGEST_SECONDS
from services.common.errors import QuireError


class Client:
    """One stream after another to one server."""

    def __init__(
        self,
        wires: Wires,
        kind: str,
        party: Party,
        server: Party,
        *,
        hello: Callable[[], Any],
        opened: Callable[[Any], None],
        received: Callable[[Any], None],
        lost: Callable[[], None],
    ) -> None:
        """`hello` makes a stream's first message, or None where that comes later; `opened` takes the answer to it and
        `received` all others.

        Both raise QuireError to drop the stream. `lost` hears of the end of every stream.
        """
        self._wires, self._kind, self._party, self._server = wires, kind, party, server
        self._hello, self._opened, self._received, self._lost = hello, opened, received, lost
        self._stream: Stream | None = None
        self._is_up = False
        self._pause = FIRST_SECONDS

    @property
    def is_up(self) -> bool:
        return self._is_up

    def connect(self) -> None:
        self._is_up = False
        self._stream = self._wires.open(self._kind, self._party, self, self._server)
        if (message := self._hello()) is not None:
            self.send(message)

    def send(self, message: Any) -> None:
        """On the present stream; into nothing where there is none."""
        if self._stream is not None:
            self._stream.send(CLIENT, message)

    def drop(self, error: QuireError) -> None:
        """Ends the present stream and opens another at once."""
        if self._stream is not None:
            self._end(error)
            self.connect()

    def received(self, stream: Stream, message: Any) -> None:
        try:
            if self._is_up:
                self._received(message)
            else:
                self._opened(message)
                self._is_up, self._pause = True, FIRST_SECONDS
        except QuireError as error:
            self._end(error)
            self._again()

    def closed(self, stream: Stream, error: QuireError) -> None:
        self._stream = None
        self._lost()
        self._again()

    def _end(self, error: QuireError) -> None:
        assert self._stream is not None
        self._stream.close(CLIENT, error)
        self._stream = None
        self._lost()

    def _again(self) -> None:
        pause, self._pause = self._pause, min(2 * self._pause, LONGEST_SECONDS)
        self._party.after(pause, self.connect)
