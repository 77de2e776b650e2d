"""How a chat fits its model's template, and how the output is to be read. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from quire.v1 import gateway_pb2
from services.common.errors import QuireError, Reason
from services.gateway.output import thinking
from services.gateway.output.parts import PlainParser
from services.gateway.output.template_facts import Style, TemplateFacts
from services.gateway.output.thinking import Thinking, ThinkingParser

TAIL_TOKENS = 16
"""Of a prompt, that tell whether it ends with the mark of thinking."""


class Decoder(Protocol):
    """Text of tokens."""

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str: ...


@dataclass(frozen=True, slots=True)
class Reading:
    """How an output is read."""

    style: Style | None  # of calls; None where none may be made
    tools: frozenset[str]
    thinking: Thinking

    def parser(self) -> ThinkingParser:
        """A new one, for one choice."""
        answer = PlainParser() if self.style is None else self.style.parser(self.tools)
        return ThinkingParser(answer, self.thinking)


def may_call(chat: gateway_pb2.Chat) -> bool:
    """Whether the model may call tools."""
    return bool(chat.tools) and chat.tool_mode != gateway_pb2.TOOL_MODE_NONE


def check_template(chat: gateway_pb2.Chat, facts: TemplateFacts) -> None:
    """Raises UNSUPPORTED, naming the field, for what the model's template cannot show or does otherwise."""
    if may_call(chat):
        if not facts.takes_tools:
            raise _unsupported("chat.tools", "this model's chat template takes no tools")
        if facts.style is None:
            raise _unsupported("chat.tools", "this model writes calls in a style that is not understood")
    for index, message in enumerate(chat.messages):
        if message.tool_calls and not facts.shows_calls:
            raise _unsupported(f"chat.messages[{index}].tool_calls", "this model's chat template shows no calls")
    if chat.HasField("thinking") and not facts.switches_thinking and chat.thinking != facts.thinks:
        what = "thinks whatever it is told" if facts.thinks else "does not mark any thinking"
        raise _unsupported("chat.thinking", f"this model's chat template {what}")


def reading_of(
    chat: gateway_pb2.Chat, facts: TemplateFacts, decoder: Decoder, prompt_ids: Sequence[int]
) -> Reading | None:
    """How the output of a chat that fits its template is read; None where all of it is text."""
    calls = may_call(chat)
    if not calls and not (chat.split_reasoning and facts.thinks):
        return None
    begin = _beginning(decoder, prompt_ids) if facts.thinks else Thinking.NEVER
    tools = frozenset(tool.name for tool in chat.tools) if calls else frozenset()
    return Reading(facts.style if calls else None, tools, begin)


def _beginning(decoder: Decoder, prompt_ids: Sequence[int]) -> Thinking:
    tail = decoder.decode(prompt_ids[-TAIL_TOKENS:], skip_special=False).rstrip()
    if tail.endswith(thinking.BEGIN):
        return Thinking.OPEN
    return Thinking.NEVER if tail.endswith(thinking.END) else Thinking.MAYBE


def _unsupported(path: str, message: str) -> QuireError:
    return QuireError(Reason.UNSUPPORTED, f"{path}: {message}", field=path)
