"""Cuts an answer into blocks, as the APIs want it that number what they send: thinking, text, calls. Pure."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from services.gateway.output.parts import CallArguments, CallBegin, CallFault, Message, Part, Reasoning, Text


class Kind(enum.Enum):
    REASONING = enum.auto()
    TEXT = enum.auto()
    CALL = enum.auto()


@dataclass(slots=True)
class Block:
    """One block. Its text is that of a call's arguments, too."""

    index: int
    kind: Kind
    call: CallBegin | None = None
    faulty: bool = False  # a call that turned out to be none
    written: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.written)


class Change(enum.Enum):
    OPENED = enum.auto()
    GREW = enum.auto()
    CLOSED = enum.auto()


Step = tuple[Change, Block, str]  # with the new text of a block that grew


class BlockCutter:
    """Blocks come one after the other."""

    def __init__(self, *, show_reasoning: bool) -> None:
        self._show_reasoning = show_reasoning
        self.blocks: list[Block] = []
        self._open: Block | None = None

    def push(self, parts: Iterable[Part]) -> Iterator[Step]:
        """What the next parts change."""
        for part in parts:
            match part:
                case Reasoning() if self._show_reasoning:
                    yield from self._grow(Kind.REASONING, part.text)
                case Text():
                    yield from self._grow(Kind.TEXT, part.text)
                case CallBegin():
                    yield from self._begin(Kind.CALL, part)
                case CallArguments():
                    yield from self._grow(Kind.CALL, part.text)
                case CallFault() if self._open is not None:
                    self._open.faulty = True
                    yield from self._close()

    def finish(self) -> Iterator[Step]:
        """Closes the last block. An answer has one at least."""
        if not self.blocks:
            yield from self._begin(Kind.TEXT, None)
        yield from self._close()

    def _grow(self, kind: Kind, text: str) -> Iterator[Step]:
        if self._open is None or self._open.kind is not kind:
            yield from self._begin(kind, None)
        assert self._open is not None
        self._open.written.append(text)
        yield Change.GREW, self._open, text

    def _begin(self, kind: Kind, call: CallBegin | None) -> Iterator[Step]:
        yield from self._close()
        self._open = Block(len(self.blocks), kind, call)
        self.blocks.append(self._open)
        yield Change.OPENED, self._open, ""

    def _close(self) -> Iterator[Step]:
        block, self._open = self._open, None
        if block is not None:
            yield Change.CLOSED, block, ""


def blocks_of(message: Message, *, show_reasoning: bool) -> list[Block]:
    """The blocks of a whole answer: thinking, text, calls."""
    cutter = BlockCutter(show_reasoning=show_reasoning)
    parts: list[Part] = [Reasoning(message.reasoning)] if message.reasoning else []
    parts += [Text(message.text)] if message.text else []
    for call in message.calls:
        parts += [CallBegin(call.index, call.name), CallArguments(call.index, call.arguments)]
    for _ in (*cutter.push(parts), *cutter.finish()):
        pass
    return cutter.blocks


def event(name: str, body: str) -> bytes:
    """A named event of a stream; `body` is JSON of ASCII."""
    return f"event: {name}\ndata: {body}\n\n".encode("ascii")
