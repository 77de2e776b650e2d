"""What an output is made of, in the order in which it was written."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Text:
    """Part of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Part of what the model thought before it answered."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A call of a tool begins. Calls are numbered from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments: JSON text, as it was written."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallFault:
    """A call that had begun is none after all. `text` is all that was written of it: whoever still can shows that."""

    index: int
    text: str


CallPart = CallBegin | CallArguments | CallFault
CALL_PARTS = (CallBegin, CallArguments, CallFault)
Part = Text | Reasoning | CallPart


class Parser(Protocol):
    """Reads one growing output."""

    def push(self, text: str) -> list[Part]:
        """What became certain with the next text."""

    def finish(self) -> list[Part]:
        """What was still held back, once no more comes."""


class PlainParser:
    """All is text."""

    def push(self, text: str) -> list[Part]:
        return [Text(text)] if text else []

    def finish(self) -> list[Part]:
        return []


@dataclass(slots=True)
class Call:
    """A whole call."""

    index: int
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Message:
    """A whole output, without calls that turned out to be none: they are text."""

    text: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)


def fold(parts: Iterable[Part]) -> Message:
    """The whole of an output's parts."""
    calls: dict[int, Call] = {}
    text, reasoning = [], []
    for part in parts:
        match part:
            case Text():
                text.append(part.text)
            case Reasoning():
                reasoning.append(part.text)
            case CallBegin():
                calls[part.index] = Call(part.index, part.name)
            case CallArguments():
                calls[part.index].arguments += part.text
            case CallFault():
                del calls[part.index]
                text.append(part.text)
    return Message("".join(text), "".join(reasoning), list(calls.values()))


def merged(parts: Iterable[Part]) -> tuple[Part, ...]:
    """Neighbours of one kind joined."""
    joined: list[Part] = []
    for part in parts:
        last = joined[-1] if joined else None
        if isinstance(part, Text) and isinstance(last, Text):
            joined[-1] = Text(last.text + part.text)
        elif isinstance(part, Reasoning) and isinstance(last, Reasoning):
            joined[-1] = Reasoning(last.text + part.text)
        elif isinstance(part, CallArguments) and isinstance(last, CallArguments) and part.index == last.index:
            joined[-1] = CallArguments(part.index, last.text + part.text)
        else:
            joined.append(part)
    return tuple(joined)


def reasoning_of(parts: Iterable[Part]) -> str:
    """The thinking among parts."""
    return "".join(part.text for part in parts if isinstance(part, Reasoning))


def visible(parts: Iterable[Part]) -> str:
    """The text among parts, as a reader of the stream sees it."""
    return "".join(part.text for part in parts if isinstance(part, Text))
