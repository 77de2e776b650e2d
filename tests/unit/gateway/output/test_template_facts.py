"""What chat templates show of their models."""

from __future__ import annotations

from typing import Any

import pytest

from quire.v1 import gateway_pb2
from services.common.errors import QuireError, Reason
from services.gateway.chat_plan import check_template, reading_of
from services.gateway.chat_template import ChatTemplate
from services.gateway.output.template_facts import Style, TemplateFacts
from services.gateway.output.thinking import Thinking
from tests.fixtures.chat_templates import HERMES, LLAMA, PLAIN, REASONER, XML

TOOLS = [gateway_pb2.Tool(name="f", parameters="{}")]
CALL = gateway_pb2.ToolCall(id="1", name="f", arguments="{}")


def facts(source: str) -> TemplateFacts:
    return ChatTemplate(source, {}).facts


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (PLAIN, TemplateFacts()),
        (HERMES, TemplateFacts(True, Style.HERMES, shows_calls=True, thinks=True, switches_thinking=True)),
        (LLAMA, TemplateFacts(True, Style.LLAMA, shows_calls=True)),
        (REASONER, TemplateFacts(thinks=True)),
        (XML, TemplateFacts(True, None)),
    ],
    ids=["plain", "hermes", "llama", "reasoner", "xml"],
)
def test_facts(source: str, expected: TemplateFacts) -> None:
    assert facts(source) == expected


@pytest.mark.parametrize(
    ("source", "fields", "field"),
    [
        (PLAIN, {"tools": TOOLS}, "chat.tools"),
        (XML, {"tools": TOOLS}, "chat.tools"),
        (PLAIN, {"messages": [gateway_pb2.ChatMessage(tool_calls=[CALL])]}, "chat.messages[0].tool_calls"),
        (PLAIN, {"thinking": True}, "chat.thinking"),
        (REASONER, {"thinking": False}, "chat.thinking"),
        (PLAIN, {"tools": TOOLS, "tool_mode": gateway_pb2.TOOL_MODE_NONE}, None),
        (PLAIN, {"thinking": False}, None),
        (REASONER, {"thinking": True}, None),
        (HERMES, {"tools": TOOLS, "thinking": False}, None),
        (LLAMA, {"messages": [gateway_pb2.ChatMessage(tool_calls=[CALL])]}, None),
    ],
)
def test_a_template_that_cannot_show_what_is_asked(source: str, fields: dict[str, Any], field: str | None) -> None:
    chat = gateway_pb2.Chat(**fields)
    if field is None:
        check_template(chat, facts(source))
        return
    with pytest.raises(QuireError, match="this model") as caught:
        check_template(chat, facts(source))
    assert (caught.value.reason, caught.value.field) == (Reason.UNSUPPORTED, field)


class Tail:
    """A decoder of a prompt that ends so."""

    def __init__(self, text: str) -> None:
        self.text = text

    def decode(self, ids: Any, skip_special: bool = True) -> str:
        assert not skip_special
        return self.text


@pytest.mark.parametrize(
    ("source", "tail", "fields", "expected"),
    [
        (PLAIN, "<think>", {"split_reasoning": True}, None),
        (REASONER, "assistant\n<think>\n", {}, None),
        (REASONER, "assistant\n<think>\n", {"split_reasoning": True}, Thinking.OPEN),
        (HERMES, "assistant\n", {"split_reasoning": True}, Thinking.MAYBE),
        (HERMES, "<think>\n\n</think>\n\n", {"split_reasoning": True}, Thinking.NEVER),
        (HERMES, "assistant\n", {"tools": TOOLS}, Thinking.MAYBE),
        (LLAMA, "assistant\n", {"tools": TOOLS}, Thinking.NEVER),
        (LLAMA, "assistant\n", {"tools": TOOLS, "tool_mode": gateway_pb2.TOOL_MODE_NONE}, None),
    ],
)
def test_how_an_output_is_read(source: str, tail: str, fields: dict[str, Any], expected: Thinking | None) -> None:
    found = reading_of(gateway_pb2.Chat(**fields), facts(source), Tail(tail), [1, 2])
    assert (None if found is None else found.thinking) == expected
    if found is not None:
        assert found.tools == ({"f"} if "tools" in fields else set())
