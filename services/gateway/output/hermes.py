"""Calls as Hermes and Qwen write them: anywhere in the text, <tool_call>{"name": ..., "arguments": ...}</tool_call>."""

from __future__ import annotations

import enum
from collections.abc import Collection

from services.gateway.output.call_reader import CallReader
from services.gateway.output.growing import GrowingText
from services.gateway.output.marks import SPACES, may_begin
from services.gateway.output.parts import Part, Text

BEGIN, END = "<tool_call>", "</tool_call>"


class _At(enum.Enum):
    TEXT = enum.auto()
    CALL = enum.auto()
    END_MARK = enum.auto()  # or, where a model leaves it out, whatever follows
    BEHIND = enum.auto()


class HermesParser(GrowingText):
    """Blanks that touch a call are dropped; all else that is no call is text."""

    def __init__(self, tools: Collection[str]) -> None:
        super().__init__()
        self._calls = CallReader(tools)
        self._at = _At.TEXT

    def finish(self) -> list[Part]:
        held, self._held = self._held, ""
        if self._at is _At.TEXT and held:
            return [Text(held)]
        return self._calls.finish()

    def _step(self, parts: list[Part]) -> bool:
        match self._at:
            case _At.TEXT:
                behind = self._until(BEGIN, Text, parts)
                if behind is None:
                    return False
                self._calls.begin(self._held)
                self._at, self._held = _At.CALL, behind
            case _At.CALL:
                self._held, read = self._calls.push(self._held)
                parts.extend(read)
                if self._calls.reading:
                    return False
                self._at = _At.END_MARK if self._calls.whole else _At.TEXT
            case _At.END_MARK:
                self._held = self._held.lstrip(SPACES)
                if may_begin(self._held, END):
                    return False
                self._held = self._held.removeprefix(END)
                self._at = _At.BEHIND
            case _At.BEHIND:
                self._held = self._held.lstrip(SPACES)
                if not self._held:
                    return False
                self._at = _At.TEXT
        return True
