"""Order of what is written on one stream by several hands."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest

from services.common.errors import QuireError, Reason
from services.kvmanager.streams import PeerStream


class Context:
    """Takes its time over each message, or fails."""

    def __init__(self) -> None:
        self.written: list[str] = []
        self.fails = False

    async def write(self, message: str) -> None:
        await asyncio.sleep(0)
        if self.fails:
            raise ConnectionError("the peer is gone")
        self.written.append(message)


def text(value: str) -> str:
    return value


async def test_messages_leave_in_the_order_in_which_they_were_asked_for() -> None:
    """A push's task begins later than the answer that is sent right after it; it is written first all the same."""
    context: Any = Context()
    stream: PeerStream[str, str] = PeerStream(context)
    first = asyncio.create_task(stream.push(partial(text, "pushed")))
    second = asyncio.create_task(stream.push(lambda: None))
    third = asyncio.create_task(stream.push(partial(text, "pushed too")))
    await stream.send(partial(text, "sent"))
    assert context.written == ["pushed", "pushed too", "sent"]
    await asyncio.gather(first, second, third)
    assert context.written == ["pushed", "pushed too", "sent"]


async def test_a_message_states_what_holds_when_its_turn_comes() -> None:
    context: Any = Context()
    stream: PeerStream[str, str] = PeerStream(context)
    state = ["old"]
    push = asyncio.create_task(stream.push(lambda: state[0]))
    state[0] = "new"
    await push
    assert context.written == ["new"]


async def test_nothing_is_written_after_the_end() -> None:
    context: Any = Context()
    stream: PeerStream[str, str] = PeerStream(context)
    stream.close(QuireError(Reason.DRAINING, "over"))
    await stream.send(partial(text, "late"))
    assert context.written == []


async def test_a_push_to_a_peer_that_leaves_is_no_error_and_an_answer_is() -> None:
    context: Any = Context()
    stream: PeerStream[str, str] = PeerStream(context)
    context.fails = True
    await stream.push(partial(text, "pushed"))
    with pytest.raises(ConnectionError):
        await stream.send(partial(text, "sent"))


async def test_a_reader_that_fails_as_the_stream_is_closed_is_no_unexpected_error() -> None:
    unexpected: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, what: unexpected.append(what))
    context: Any = Context()
    stream: PeerStream[str, str] = PeerStream(context)

    async def requests() -> AsyncIterator[str]:
        yield "one"

    async def handle(request: str) -> None:
        stream.close(QuireError(Reason.DRAINING, "over"))
        raise ConnectionError("the peer is gone")

    async def serve() -> str:
        try:
            await stream.serve(requests(), handle)
        except QuireError as error:
            return error.message  # and forgets the reader with the error
        return ""

    assert await serve() == "over"
    gc.collect()
    assert unexpected == []
