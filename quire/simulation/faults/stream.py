"""Bidirectional streams between parties, as gRPC has them: each direction keeps order and loses nothing while it lasts.

Where one breaks, what is under way in either direction may be lost from some point on, and each end learns of it in its
own time.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Protocol

from quire.simulation.faults.party import Party
from quire.simulation.timeline import Timeline
from services.common.errors import QuireError, Reason

LATENCY_SECONDS = 0.0002
CLIENT, SERVER = 0, 1
NOTICED_AT_ONCE, NOTICED_LATE = 0.001, 0.5
"""Seconds until an end learns that the other is gone: the system's word, or its silence."""


class End(Protocol):
    """What one end of a stream does."""

    def received(self, stream: Stream, message: Any) -> None:
        """A message arrived."""
        ...

    def closed(self, stream: Stream, error: QuireError) -> None:
        """The stream is over, and it was not this end that closed it."""
        ...


class Stream:
    """One stream, from its opening to its end."""

    def __init__(self, wires: Wires, name: str, client: Party, server: Party) -> None:
        self.name = name
        self.parties = (client, server)
        self._wires = wires
        self._lives = (client.life, server.life)
        self._ends: list[End | None] = [None, None]
        self._open = [True, True]  # whether an end takes it for open
        self._severed = False  # nothing that is sent from now on arrives
        self._cuts = [0, 0]  # by sender: what was sent before the last one is lost
        self._last_arrival = [0.0, 0.0]  # by sender

    def attach(self, side: int, end: End) -> None:
        self._ends[side] = end

    @property
    def is_over(self) -> bool:
        return not any(self._open)

    def is_open(self, side: int) -> bool:
        return self._open[side]

    def send(self, side: int, message: Any) -> None:
        """From that end to the other; into nothing where the stream is over."""
        if self._open[side] and not self._severed:
            self._arrive_later(side, self._deliver, message)

    def close(self, side: int, error: QuireError) -> None:
        """That end ends the stream. The other one reads what was sent before, or a part of it."""
        if not self._open[side]:
            return
        self._open[side] = False
        if not self._severed:
            if self._wires.rng.random() < 0.5:
                self._cuts[1 - side] += 1  # nobody reads it
            self._arrive_later(side, self._notice, error)

    def sever(self, error: QuireError) -> None:
        """The network between the ends breaks."""
        self._severed = True
        for side in (CLIENT, SERVER):
            if self._wires.rng.random() < 0.7:
                self._cuts[side] += 1
            self._notice_later(side, error)

    def abandon(self, party: Party, error: QuireError) -> None:
        """The process of one end is gone. What it sent before may still arrive."""
        side = self.parties.index(party)
        self._open[side], self._severed = False, True
        if self._wires.rng.random() < 0.5:
            self._cuts[side] += 1
        self._notice_later(1 - side, error)

    def _notice_later(self, side: int, error: QuireError) -> None:
        delay = self._wires.rng.choice([NOTICED_AT_ONCE, NOTICED_AT_ONCE, self._wires.rng.uniform(0, NOTICED_LATE)])
        self._wires.timeline.at(self._wires.timeline.now + delay, self._notice, side, self._cuts[1 - side], error)

    def _arrive_later(self, side: int, action: Callable[[int, int, Any], None], message: Any) -> None:
        arrival = max(self._wires.timeline.now + self._wires.latency(self.name), self._last_arrival[side])
        self._last_arrival[side] = arrival
        self._wires.timeline.at(arrival, action, 1 - side, self._cuts[side], message)

    def _deliver(self, side: int, cut: int, message: Any) -> None:
        end = self._ends[side]
        if self._open[side] and cut == self._cuts[1 - side] and end is not None:
            self._wires.log(self, side, message)
            self.parties[side].run(self._lives[side], self._receive, side, message)

    def _receive(self, side: int, message: Any) -> None:
        end = self._ends[side]
        if self._open[side] and end is not None:
            end.received(self, message)

    def _notice(self, side: int, cut: int, error: QuireError) -> None:
        self.parties[side].run(self._lives[side], self._close, side, error)

    def _close(self, side: int, error: QuireError) -> None:
        end = self._ends[side]
        if self._open[side] and end is not None:
            self._open[side] = False
            self._wires.log(self, side, error)
            end.closed(self, error)


class Acceptor(Protocol):
    """A party that others open streams to."""

    def accept(self, kind: str, stream: Stream) -> End:
        """The server's end of a new stream."""
        ...


class Wires:
    """All streams of a world, and how long messages take."""

    def __init__(self, timeline: Timeline, rng: random.Random, log: Callable[[Stream, int, Any], None]) -> None:
        self.timeline, self.rng, self.log = timeline, rng, log
        self.late_until = 0.0  # what was sent late so far has arrived by then
        self._streams: list[Stream] = []
        self._late: dict[str, float] = {}  # stream name -> seconds that its next message takes longer

    def open(self, kind: str, client: Party, end: End, server: Party) -> Stream:
        """A new stream; where nobody listens, its client learns that in a moment."""
        stream = Stream(self, f"{client.name}>{server.name}", client, server)
        stream.attach(CLIENT, end)
        if server.alive:
            assert isinstance(server, Party)
            stream.attach(SERVER, server.accept(kind, stream))  # type: ignore[attr-defined]
            self._streams = [one for one in self._streams if not one.is_over]
            self._streams.append(stream)
        else:
            stream.sever(QuireError(Reason.EXECUTOR_LOST, "nobody listens"))
        return stream

    def latency(self, name: str) -> float:
        late = self._late.pop(name, 0.0)
        latency = LATENCY_SECONDS * self.rng.choice([1, 1, 1, 3]) + late
        if late:
            self.late_until = max(self.late_until, self.timeline.now + latency)
        return latency

    def of(self, party: Party) -> list[Stream]:
        """The streams of a party that have not ended."""
        return [stream for stream in self._streams if party in stream.parties and not stream.is_over]

    def delay_next(self, stream: Stream, seconds: float) -> None:
        """The next message takes longer, and what follows it waits. A silent stream may send it long after."""
        self._late[stream.name] = seconds
