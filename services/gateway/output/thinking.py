"""Parts what a model thinks from what it answers: <think>...</think> at the beginning of an output."""

from __future__ import annotations

import enum

from services.gateway.output.growing import GrowingText
from services.gateway.output.marks import SPACES, may_begin
from services.gateway.output.parts import Parser, Part, Reasoning

BEGIN, END = "<think>", "</think>"


class Thinking(enum.Enum):
    """How an output begins."""

    NEVER = enum.auto()  # with the answer
    MAYBE = enum.auto()  # with the mark, where the model thinks first
    OPEN = enum.auto()  # with what it thinks: the prompt ended with the mark


class _At(enum.Enum):
    START = enum.auto()
    FIRST = enum.auto()  # behind the mark
    REASONING = enum.auto()
    BEHIND = enum.auto()
    ANSWER = enum.auto()


class ThinkingParser(GrowingText):
    """Blanks that touch the marks are dropped. What is never closed is all thinking."""

    def __init__(self, answer: Parser, thinking: Thinking) -> None:
        """`answer` reads what follows."""
        super().__init__()
        self._answer = answer
        first = {Thinking.NEVER: _At.ANSWER, Thinking.MAYBE: _At.START, Thinking.OPEN: _At.FIRST}
        self._at = first[thinking]
        self.thought = thinking is Thinking.OPEN
        """Whether the output has thinking."""

    @property
    def thinking(self) -> bool:
        """Whether the next token may be one of thinking."""
        return self._at in (_At.START, _At.FIRST, _At.REASONING)

    def push(self, text: str) -> list[Part]:
        if self._at is _At.ANSWER:
            return self._answer.push(text)
        return super().push(text)

    def finish(self) -> list[Part]:
        held, self._held = self._held, ""
        if self._at is _At.REASONING:
            held = held.rstrip(SPACES)
            return [Reasoning(held)] if held else []
        if self._at is _At.START:
            return [*self._answer.push(held), *self._answer.finish()]
        return self._answer.finish()

    def _step(self, parts: list[Part]) -> bool:
        match self._at:
            case _At.START:
                text = self._held.lstrip(SPACES)
                if may_begin(text, BEGIN):
                    return False
                self.thought = text.startswith(BEGIN)
                if self.thought:
                    self._at, self._held = _At.FIRST, text.removeprefix(BEGIN)
                else:
                    self._at = _At.ANSWER
            case _At.FIRST | _At.BEHIND:
                self._held = self._held.lstrip(SPACES)
                if not self._held:
                    return False
                self._at = _At.REASONING if self._at is _At.FIRST else _At.ANSWER
            case _At.REASONING:
                behind = self._until(END, Reasoning, parts)
                if behind is None:
                    return False
                self._at, self._held = _At.BEHIND, behind
            case _At.ANSWER:
                held, self._held = self._held, ""
                parts.extend(self._answer.push(held))
                return False
        return True
