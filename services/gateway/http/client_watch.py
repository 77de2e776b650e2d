"""Ends a request's work as soon as its client has gone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from starlette.types import Receive

T = TypeVar("T")


class ClientGone(Exception):
    """The client hung up, or was cut off because it stopped reading."""


class ClientWatch:
    """Watches one connection. Use it only once the request's body is read."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._cut = asyncio.Event()

    def cut(self) -> None:
        """Treats the client as gone."""
        self._cut.set()

    async def run(self, work: Awaitable[T]) -> T:
        """The result of `work`; cancels it, waits for its end and raises ClientGone when the client goes first."""
        task = asyncio.create_task(_awaited(work))
        signs = [asyncio.create_task(self._hung_up()), asyncio.create_task(self._cut.wait())]
        try:
            await asyncio.wait([task, *signs], return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ClientGone
            return task.result()
        finally:
            for one in (task, *signs):
                one.cancel()
            await asyncio.gather(task, *signs, return_exceptions=True)

    async def _hung_up(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass


async def _awaited(work: Awaitable[T]) -> T:
    return await work
