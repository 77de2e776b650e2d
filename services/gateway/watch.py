"""Looks after open requests now and then: readers that stalled are cut, requests end that nobody comes back for, or
that no scheduler takes."""

from __future__ import annotations

import asyncio

from services.gateway.generation import Generation
from services.gateway.scheduler_link import SchedulerLinks
from services.gateway.streams import Streams

PERIOD = 0.25  # seconds
GRACE = 2.0  # seconds in which a cut reader may fetch its error


class Watch:
    """Owns the timer, which runs only while requests are open or kept."""

    def __init__(self, links: SchedulerLinks, streams: Streams, slow_reader_seconds: float) -> None:
        self._links, self._streams, self._limit = links, streams, slow_reader_seconds
        self._open: set[Generation] = set()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, generation: Generation) -> None:
        self._open.add(generation)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(PERIOD, self._look)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._links.expire(now)
        for generation in list(self._open):
            stalled = generation.stalled(now)
            if generation.done:
                self._open.discard(generation)
            elif stalled > self._limit + GRACE:
                generation.abandon()
            elif stalled > self._limit:
                generation.cut()
        kept = self._streams.look(now)
        self._timer = loop.call_later(PERIOD, self._look) if self._open or kept else None
