"""The journal that several gateways share: a Redis Stream for each request, written behind its tokens.

A stream's head is written while its prompt waits and is computed, before its first event leaves. No token waits: what a
gateway has not written when it dies, the scheduler still has. While Redis is lost streams go on, and what it forgot is
written again once it is back.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.resources import files

from google.protobuf.message import DecodeError

from quire.v1 import journal_pb2
from services.common.store import Store, StoreLost
from services.gateway.journal.record import Written, next_piece
from services.gateway.stream import Stream

log = logging.getLogger("quire.gateway.journal")

PREFIX = "quire:journal:1"
PAUSE_SECONDS = 0.1
"""Between writes: what happens meanwhile goes in one."""
MOST_STREAMS = 8192
"""Of one tenant; streams beyond that go on without a journal."""
MOST_BYTES = 8 << 20
"""Of one stream; it goes on without a journal then."""
AT_ONCE = 64
"""Streams in one round trip."""

Record = tuple[journal_pb2.JournalHead, list[journal_pb2.JournalPiece]]


@dataclass(slots=True, eq=False)
class _Followed:
    """A stream with what its journal has."""

    stream: Stream
    head: bytes
    written: Written = field(default_factory=Written)
    is_new: bool = True  # the head is not there, as far as is known
    size: int = 0
    told_at: float = 0.0
    begun: asyncio.Event = field(default_factory=asyncio.Event)  # the head is there, or cannot be written now


class SharedJournal:
    """Owns what is still to be written. Used from one event loop."""

    def __init__(self, store: Store, window: float) -> None:
        """Journals are kept for `window` seconds behind the last word of their gateway."""
        self._store, self._window = store, window
        self.on_gone: Callable[[str], None] = lambda why: None  # told why a stream goes on without a journal
        self._keep_ms = max(1, round(1000 * window))
        self._append = (files("services.gateway.journal") / "append.lua").read_text(encoding="utf-8")
        self._followed: dict[Stream, _Followed] = {}
        self._new: dict[Stream, _Followed] = {}
        self._changed: dict[Stream, None] = {}  # but for new ones
        self._removed: list[tuple[str, str]] = []  # tenant and request id
        self._wake, self._wake_for_new = asyncio.Event(), asyncio.Event()
        self._ending = False
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [asyncio.create_task(run(), name="journal") for run in (self._run, self._run_new)]

    async def stop(self) -> None:
        """Ends once all is written, or cannot be."""
        self._ending = True
        self._wake.set()
        self._wake_for_new.set()
        if self._tasks:
            await asyncio.wait(self._tasks)  # not cancelled: a write under way may not hear of it
        with contextlib.suppress(StoreLost):
            await self._write_new()
            await self._write()

    def follow(self, stream: Stream, head: journal_pb2.JournalHead, written: Written | None = None) -> None:
        """Writes a stream's journal from now on; `written` is what it has already."""
        followed = _Followed(stream, head.SerializeToString())
        self._followed[stream] = followed
        stream.request.on_change = lambda: self._touch(stream)
        if written is not None:
            followed.written, followed.is_new = written, False
            followed.begun.set()
            self._touch(stream)
        else:
            self._begin(followed)

    async def begun(self, stream: Stream) -> None:
        """Returns once other gateways can find a stream, or Redis is lost."""
        followed = self._followed.get(stream)
        if followed is not None and not self._store.lost:
            await followed.begun.wait()

    def end(self, stream: Stream, *, keeps: bool) -> None:
        """A stream ended. Its journal is kept for those who come back for the rest, or removed."""
        if stream not in self._followed:
            return
        if keeps:
            self._touch(stream)
            return
        self._drop(stream)
        self._remove(stream)
        self._wake.set()

    def let_go(self, stream: Stream) -> None:
        """Another gateway has the stream, and its journal, now."""
        self._drop(stream)

    async def read(self, tenant: str, request_id: str) -> Record | None:
        """What was written about a request, if anything. Raises StoreLost."""
        name = _name(tenant, request_id)
        entries = await self._store.ask(lambda: self._store.client.xrange(name))
        head, pieces = None, list[journal_pb2.JournalPiece]()
        try:
            for _, fields in entries:
                if (data := fields.get(b"h")) is not None:
                    head, pieces = journal_pb2.JournalHead.FromString(data), []
                elif (data := fields.get(b"p")) is not None:
                    pieces.append(journal_pb2.JournalPiece.FromString(data))
        except DecodeError:
            log.error("a journal cannot be read", extra={"key": name})
            return None
        return None if head is None else (head, pieces)

    def _begin(self, followed: _Followed) -> None:
        followed.written, followed.is_new, followed.size = Written(), True, 0
        self._new[followed.stream] = followed
        self._changed.pop(followed.stream, None)
        self._wake_for_new.set()

    def _touch(self, stream: Stream) -> None:
        if stream in self._followed and stream not in self._new:
            self._changed[stream] = None
            self._wake.set()

    def _drop(self, stream: Stream) -> None:
        if (followed := self._followed.pop(stream, None)) is not None:
            followed.begun.set()
        self._new.pop(stream, None)
        self._changed.pop(stream, None)
        stream.request.on_change = None

    def _remove(self, stream: Stream) -> None:
        self._removed.append((stream.request.tenant, stream.request.request_id))

    async def _run(self) -> None:
        """Writes what changed, and tells Redis of streams that stand still that their gateway is alive."""
        loop = asyncio.get_running_loop()
        while not self._ending:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._window / 4):
                    await self._wake.wait()
            self._wake.clear()
            stale = loop.time() - self._window / 3
            for one in self._followed.values():
                if one.told_at < stale:
                    self._touch(one.stream)
            try:
                await self._write()
            except StoreLost:
                self._give_up()
                self._wake.set()  # to try again
                await asyncio.sleep(min(1.0, self._window / 10))
            except Exception:
                log.exception("unexpected error while journals were written")
            await asyncio.sleep(PAUSE_SECONDS)

    async def _run_new(self) -> None:
        """Writes the heads of new streams at once."""
        while not self._ending:
            await self._wake_for_new.wait()
            self._wake_for_new.clear()
            try:
                await self._write_new()
            except StoreLost:
                self._give_up()
                await asyncio.sleep(min(1.0, self._window / 10))
                self._wake_for_new.set()  # to try again
            except Exception:
                log.exception("unexpected error while journals were begun")

    async def _write_new(self) -> None:
        while self._new:
            await self._write_some(list(self._new.values())[:AT_ONCE])

    def _give_up(self) -> None:
        """Redis is lost: what is over is not kept for others, and what was to be removed expires."""
        for stream in [one.stream for one in self._followed.values() if one.stream.ended]:
            self._drop(stream)
        for followed in self._new.values():
            followed.begun.set()
        self._removed.clear()

    async def _write(self) -> None:
        """Brings Redis to where the streams are now. What fails is tried again with the next write."""
        while self._removed:
            names = self._removed[:AT_ONCE]
            await self._store.ask(lambda: self._delete(names))  # noqa: B023  # awaited here
            del self._removed[: len(names)]
        waiting, self._changed = list(self._changed), {}
        for at in range(0, len(waiting), AT_ONCE):
            part = waiting[at : at + AT_ONCE]
            some = [self._followed[stream] for stream in part if stream in self._followed and stream not in self._new]
            try:
                await self._write_some(some)
            except BaseException:
                for stream in waiting[at:]:
                    self._touch(stream)
                raise

    async def _write_some(self, some: Sequence[_Followed]) -> None:
        copies = [copy.deepcopy(one.written) for one in some]
        pieces = [next_piece(one.stream.request, to) for one, to in zip(some, copies, strict=True)]
        data = [b"" if piece is None else piece.SerializeToString() for piece in pieces]
        over = [one.stream.ended for one in some]
        answers = await self._store.ask(lambda: self._send(some, data))
        for one, written, piece, was_over, answer in zip(some, copies, data, over, answers, strict=True):
            if one.stream in self._followed:
                self._answered(one, written, len(piece), answer)
                if was_over and not one.is_new:
                    self._drop(one.stream)  # all of it is there

    def _answered(self, followed: _Followed, written: Written, size: int, answer: int) -> None:
        stream = followed.stream
        followed.told_at = asyncio.get_running_loop().time()
        if answer == 0:  # Redis forgot it
            self._begin(followed)
            return
        followed.written, followed.is_new = written, False
        followed.begun.set()
        if self._new.pop(stream, None) is not None:
            self._touch(stream)  # for what happened meanwhile
        followed.size += size
        if answer < 0 or followed.size > MOST_BYTES:
            self.on_gone("streams" if answer < 0 else "bytes")
            self._drop(stream)
            self._remove(stream)

    async def _send(self, some: Sequence[_Followed], data: Sequence[bytes]) -> list[int]:
        pipe = self._store.client.pipeline(transaction=False)
        for followed, piece in zip(some, data, strict=True):
            request = followed.stream.request
            head = followed.head if followed.is_new else b""
            keys = _name(request.tenant, request.request_id), _name(request.tenant, "")
            pieces = [piece] if piece else []
            pipe.eval(self._append, 2, *keys, self._keep_ms, MOST_STREAMS, request.request_id, head, *pieces)
        answers: list[int] = await pipe.execute()
        return answers

    async def _delete(self, some: Sequence[tuple[str, str]]) -> None:
        pipe = self._store.client.pipeline(transaction=False)
        for tenant, request_id in some:
            pipe.delete(_name(tenant, request_id))
            pipe.zrem(_name(tenant, ""), request_id)
        await pipe.execute()


def _name(tenant: str, request_id: str) -> str:
    """Of a stream; of a tenant's index where the id is empty. All keys of a tenant lie on one node of a cluster."""
    return f"{PREFIX}:{{{tenant}}}:{request_id}"
