"""Links between parties. Every message of a simulated world passes `Network.carry`: faults change its fate there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from quire.simulation.timeline import Timeline

M = TypeVar("M")

Fate = Callable[["Link[Any]", Any], Sequence[float]]
"""What becomes of a message on a link: an extra delay, in seconds, each time that it arrives; none where it is lost."""


def on_time(link: Link[Any], message: Any) -> Sequence[float]:
    """The fate of a message where nothing goes wrong."""
    return (0.0,)


class Network:
    """Carries messages between parties, each link with its latency."""

    def __init__(self, timeline: Timeline, fate: Fate = on_time) -> None:
        self.timeline = timeline
        self.fate = fate
        self.message_count = 0

    def carry(self, link: Link[M], message: M, departure: float) -> None:
        """Delivers a message that leaves at `departure`. A link keeps order: what is late holds up what follows."""
        self.message_count += 1
        for delay in self.fate(link, message):
            link.last_arrival = max(departure + link.seconds + delay, link.last_arrival)
            self.timeline.at(link.last_arrival, link.deliver, message, link.opening)


class Link(Generic[M]):
    """One direction between two parties, as the messages of one stream go."""

    __slots__ = ("last_arrival", "name", "network", "opening", "receive", "seconds")

    def __init__(self, network: Network, name: str, seconds: float, receive: Callable[[M], None]) -> None:
        """`seconds`: from one end to the other; `receive` is called with each message that arrives."""
        self.network = network
        self.name = name
        self.seconds = seconds
        self.receive = receive
        self.opening = 0  # counts the streams that this link was part of
        self.last_arrival = 0.0

    def send(self, message: M, delay: float = 0.0) -> None:
        """Sends a message `delay` seconds from now."""
        self.network.carry(self, message, self.network.timeline.now + delay)

    def cut(self) -> None:
        """Ends the stream: what is under way never arrives."""
        self.opening += 1

    def deliver(self, message: M, opening: int) -> None:
        """Called by the network where a message arrives."""
        if opening == self.opening:
            self.receive(message)
