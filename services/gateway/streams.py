"""The streams of this gateway by tenant and request id: those that begin, that run, and that ended lately."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from services.gateway.stream import Stream

Key = tuple[str, str]  # tenant and request id

MOST_KEPT = 256
MOST_KEPT_TOKENS = 1 << 20
"""Streams that ended, of one tenant, and their tokens in all: the oldest go first."""


class Streams:
    """Owns what is known here by its id. Ids of different tenants never meet."""

    def __init__(self, window: float) -> None:
        """Streams that ended well are kept for `window` seconds."""
        self._window = window
        self._running: dict[Key, Stream] = {}
        self._beginning: dict[Key, asyncio.Event] = {}
        self._kept: defaultdict[str, OrderedDict[str, tuple[Stream, float]]] = defaultdict(OrderedDict)

    def __iter__(self) -> Iterator[Stream]:
        """Those that run."""
        return iter(list(self._running.values()))

    def named(self, tenant: str, request_ids: Collection[str]) -> list[Stream]:
        """Those of a tenant that run and have these ids."""
        keys = ((tenant, request_id) for request_id in request_ids)
        return [self._running[key] for key in keys if key in self._running]

    async def find(self, tenant: str, request_id: str) -> Stream | None:
        """The stream of that id. Waits for one that just begins."""
        key = tenant, request_id
        while (beginning := self._beginning.get(key)) is not None:
            await beginning.wait()
        if (running := self._running.get(key)) is not None:
            return running
        found = self._kept[tenant].get(request_id) if tenant in self._kept else None
        return found[0] if found is not None else None

    @contextmanager
    def begin(self, tenant: str, request_id: str) -> Iterator[None]:
        """Whoever asks for the id waits until this is over. Only where `find` has just found nothing."""
        key = tenant, request_id
        event = self._beginning[key] = asyncio.Event()
        try:
            yield
        finally:
            del self._beginning[key]
            event.set()

    def add(self, stream: Stream) -> None:
        """A stream runs, or is known from elsewhere and has ended well."""
        request = stream.request
        if stream.ended:
            self.end(stream, asyncio.get_running_loop().time())
        else:
            self._running[request.tenant, request.request_id] = stream

    def end(self, stream: Stream, now: float) -> None:
        """A stream ended. One that ended well is kept for a while."""
        request = stream.request
        self._running.pop((request.tenant, request.request_id), None)
        if self._window and stream.clean:
            kept = self._kept[request.tenant]
            kept[request.request_id] = stream, now + self._window
            tokens = sum(_tokens(one) for one, _ in kept.values())
            while len(kept) > MOST_KEPT or (tokens > MOST_KEPT_TOKENS and len(kept) > 1):
                tokens -= _tokens(kept.popitem(last=False)[1][0])

    def look(self, now: float) -> bool:
        """Reads on for those who are away, forgets what was kept long enough. Whether anything is left to do."""
        for stream in self:
            stream.look(now)
        for tenant, kept in list(self._kept.items()):
            while kept and next(iter(kept.values()))[1] <= now:
                kept.popitem(last=False)
            if not kept:
                del self._kept[tenant]
        return bool(self._running or self._kept)


def _tokens(stream: Stream) -> int:
    request = stream.request
    return len(request.prompt_ids) + sum(len(choice.output) for choice in request.choices)
