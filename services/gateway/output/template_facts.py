"""What a chat template shows of its model: whether it takes tools, how it writes calls, whether the model thinks."""

from __future__ import annotations

import enum
import re
from collections.abc import Collection
from dataclasses import dataclass, replace

from services.gateway.output import hermes, llama, thinking
from services.gateway.output.parts import Parser

SWITCH = "enable_thinking"
"""The variable by which templates are told whether the model shall think."""
_HEADER = "<|start_header_id|>"
_PARAMETERS = re.compile(r"""["']parameters["']\s*:""")


class Style(enum.StrEnum):
    """How a model writes calls of tools."""

    HERMES = "hermes"  # Qwen too
    LLAMA = "llama"

    def parser(self, tools: Collection[str]) -> Parser:
        return hermes.HermesParser(tools) if self is Style.HERMES else llama.LlamaParser(tools)


MARKS = frozenset({hermes.BEGIN, hermes.END, llama.TAG, thinking.BEGIN, thinking.END})
"""Texts that parsers look for. Where they are special tokens, an output that is parsed has to show them."""


@dataclass(frozen=True, slots=True)
class TemplateFacts:
    """Without a template nothing is known, and nothing is taken."""

    takes_tools: bool = False
    style: Style | None = None  # None: calls are written in no style that is understood
    shows_calls: bool = False  # of earlier messages
    thinks: bool = False
    switches_thinking: bool = False

    def with_tools_of(self, other: TemplateFacts) -> TemplateFacts:
        """What two templates of a model show, of which the other is for chats with tools."""
        return replace(
            self,
            takes_tools=other.takes_tools,
            style=other.style,
            shows_calls=other.shows_calls,
            thinks=self.thinks or other.thinks,
        )


def facts_of(source: str, variables: Collection[str]) -> TemplateFacts:
    """`variables`: those that the template reads."""
    return TemplateFacts(
        takes_tools="tools" in variables,
        style=_style_of(source),
        shows_calls="tool_calls" in source,
        thinks=thinking.BEGIN in source or thinking.END in source,
        switches_thinking=SWITCH in variables,
    )


def _style_of(source: str) -> Style | None:
    if hermes.BEGIN in source:
        # Some write an XML element per argument between these marks.
        return None if "<function=" in source or "<arg_key>" in source else Style.HERMES
    if llama.TAG in source or (_HEADER in source and _PARAMETERS.search(source)):
        return Style.LLAMA
    return None
