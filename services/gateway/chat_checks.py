"""What a chat may say of tools and their calls. Pure; every failure names its field."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from quire.v1 import gateway_pb2
from services.common.constraints.limits import MAX_RULE_BYTES
from services.common.constraints.translate import parse_json
from services.common.errors import invalid

MAX_TOOLS = 128
MAX_CALLS = 128
"""Of one message."""
MAX_EARLIER_CALLS = 4096
"""Of a chat: each is looked at before anything else is done."""
MAX_ID = 256
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


def check_tools(chat: gateway_pb2.Chat) -> None:
    """Names, schemas, and whether the choice fits the tools. Raises INVALID_FIELD."""
    if len(chat.tools) > MAX_TOOLS:
        raise invalid("chat.tools", f"at most {MAX_TOOLS} tools, not {len(chat.tools)}")
    names: set[str] = set()
    for index, tool in enumerate(chat.tools):
        path = f"chat.tools[{index}]"
        _check_name(f"{path}.name", tool.name)
        if tool.name in names:
            raise invalid(f"{path}.name", f"{tool.name} is the name of an earlier tool")
        names.add(tool.name)
        if tool.parameters:
            _check_schema(f"{path}.parameters", tool.parameters)
    mode = chat.tool_mode
    if mode not in gateway_pb2.ToolMode.values():
        raise invalid("chat.tool_mode", f"{mode} is unknown")
    if mode == gateway_pb2.TOOL_MODE_REQUIRED and not chat.tools:
        raise invalid("chat.tool_mode", "there are no tools that could be called")
    if chat.tool_name and mode != gateway_pb2.TOOL_MODE_REQUIRED:
        raise invalid("chat.tool_name", "goes with a tool_mode that requires calls")
    if chat.tool_name and chat.tool_name not in names:
        raise invalid("chat.tool_name", f"{chat.tool_name[:64]!r} is none of the tools")


def check_calls(messages: Sequence[gateway_pb2.ChatMessage]) -> None:
    """Calls in earlier messages, and that each result belongs to one. Raises INVALID_FIELD."""
    known: set[str] = set()
    count = 0
    for index, message in enumerate(messages):
        path = f"chat.messages[{index}]"
        for name in ("tool_calls", "reasoning_content"):
            if getattr(message, name) and message.role != "assistant":
                raise invalid(f"{path}.{name}", "goes with messages of the role assistant")
        if len(message.tool_calls) > MAX_CALLS:
            raise invalid(f"{path}.tool_calls", f"at most {MAX_CALLS} calls, not {len(message.tool_calls)}")
        for number, call in enumerate(message.tool_calls):
            _check_call(f"{path}.tool_calls[{number}]", call)
            known.add(call.id)
        count += len(message.tool_calls)
        if count > MAX_EARLIER_CALLS:
            raise invalid(f"{path}.tool_calls", f"a chat has at most {MAX_EARLIER_CALLS} calls")
        if message.role == "tool" and not message.tool_call_id:
            raise invalid(f"{path}.tool_call_id", "is required: it names the call that this answers")
        if message.tool_call_id and message.role != "tool":
            raise invalid(f"{path}.tool_call_id", "goes with messages of the role tool")
        if message.tool_call_id and message.tool_call_id not in known:
            raise invalid(f"{path}.tool_call_id", "names no call of an earlier message")


def _check_call(path: str, call: gateway_pb2.ToolCall) -> None:
    if not 1 <= len(call.id) <= MAX_ID:
        raise invalid(f"{path}.id", f"must have 1 to {MAX_ID} characters")
    _check_name(f"{path}.name", call.name)
    if call.arguments and not isinstance(parse_json(f"{path}.arguments", call.arguments), dict):
        raise invalid(f"{path}.arguments", "must be a JSON object")


def _check_name(path: str, name: str) -> None:
    if not _NAME.fullmatch(name):
        raise invalid(path, "must be 1 to 64 of the characters a-z, A-Z, 0-9, _ and -")


def _check_schema(path: str, text: str) -> None:
    size = len(text.encode())
    if size > MAX_RULE_BYTES:
        raise invalid(path, f"has {size} bytes, {MAX_RULE_BYTES} are the limit")
    schema: Any = parse_json(path, text)
    if not isinstance(schema, dict):
        raise invalid(path, "must be a JSON object")
    if schema.get("type", "object") != "object":
        raise invalid(path, 'must be a schema of type "object"')
