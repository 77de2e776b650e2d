"""Calls as Llama 3 writes them: an output that begins with {"name": ..., "parameters": ...}, or such JSON behind
<|python_tag|>; several are parted by semicolons."""

from __future__ import annotations

import enum
from collections.abc import Collection

from services.gateway.output.call_reader import CallReader
from services.gateway.output.growing import GrowingText
from services.gateway.output.marks import SPACES, may_begin
from services.gateway.output.parts import Part, Text

TAG = "<|python_tag|>"


class _At(enum.Enum):
    START = enum.auto()  # of the output
    NEXT = enum.auto()  # behind a call
    CALL = enum.auto()
    TEXT = enum.auto()


class LlamaParser(GrowingText):
    """Blanks that touch a call are dropped; all else that is no call is text."""

    def __init__(self, tools: Collection[str]) -> None:
        super().__init__()
        self._calls = CallReader(tools)
        self._at = _At.START

    def finish(self) -> list[Part]:
        held, self._held = self._held, ""
        if self._at is _At.NEXT:
            held = held.lstrip(SPACES)
        return [Text(held)] if held else self._calls.finish()

    def _step(self, parts: list[Part]) -> bool:
        match self._at:
            case _At.START | _At.NEXT:
                return self._look_for_call()
            case _At.TEXT:
                behind = self._until(TAG, Text, parts)
                if behind is None:
                    return False
                self._begin(self._held, behind)
            case _At.CALL:
                self._held, read = self._calls.push(self._held)
                parts.extend(read)
                if self._calls.reading:
                    return False
                self._at = _At.NEXT if self._calls.whole else _At.TEXT
        return True

    def _look_for_call(self) -> bool:
        text = self._held.lstrip(SPACES)
        if self._at is _At.NEXT:
            self._held = text
            text = text.removeprefix(";").lstrip(SPACES)
        ahead = self._held[: len(self._held) - len(text)]
        if text.startswith("{"):
            self._begin(ahead, text)
        elif text.startswith(TAG):
            self._begin(ahead + TAG, text.removeprefix(TAG))
        elif may_begin(text, TAG):  # also where there is no text yet
            return False
        else:
            self._at = _At.TEXT
        return True

    def _begin(self, ahead: str, text: str) -> None:
        self._calls.begin(ahead)
        self._at, self._held = _At.CALL, text
