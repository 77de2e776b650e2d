"""The stream to a peer: what belongs to one ends with it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from services.common.errors import QuireError, Reason
from services.scheduler.link import Link


class Call:
    """A stream that answers the hello and then ends when told. As with gRPC, its requests are read elsewhere."""

    def __init__(self, requests: AsyncIterator[str]) -> None:
        self.requests = requests
        self.over = asyncio.Event()

    def cancel(self) -> None:
        self.over.set()

    async def __aiter__(self) -> AsyncIterator[str]:
        yield f"welcome, {await anext(self.requests)}"
        await self.over.wait()


class Peer:
    def __init__(self) -> None:
        self.seen: list[str] = []

    def hello(self) -> str:
        return "me"

    def opened(self, first: str) -> None:
        self.seen.append(first)

    def received(self, message: str) -> None:
        self.seen.append(message)

    def lost(self, error: QuireError) -> None:
        self.seen.append(error.reason.name)


async def test_requests_of_a_lost_stream_end_and_take_nothing_of_the_next() -> None:
    calls: list[Call] = []

    def call(requests: AsyncIterator[str]) -> Call:
        calls.append(Call(requests))
        return calls[-1]

    peer = Peer()
    link: Link[str, str] = Link("peer", call, peer, Reason.EXECUTOR_LOST)
    running = asyncio.create_task(link.run())
    async with asyncio.timeout(10):
        while len(peer.seen) < 1:
            await asyncio.sleep(0)
        pending = asyncio.create_task(anext(calls[0].requests, "over"))
        await asyncio.sleep(0)
        calls[0].over.set()
        while len(peer.seen) < 3:
            await asyncio.sleep(0)
        link.send("news")
        assert await pending == "over"
        assert await anext(calls[1].requests) == "news"
    assert peer.seen == ["welcome, me", "EXECUTOR_LOST", "welcome, me"]
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    assert running.cancelled()
