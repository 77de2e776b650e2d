"""Tools and their calls as chat completions write them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from quire.v1 import gateway_pb2
from quire.v1.gateway_pb2 import TOOL_MODE_AUTO, TOOL_MODE_NONE, TOOL_MODE_REQUIRED
from services.common.constraints.limits import check_nesting
from services.gateway.call_ids import call_id
from services.gateway.chat_checks import MAX_CALLS, MAX_ID, MAX_TOOLS
from services.gateway.events import Started
from services.gateway.http.body_types import Body, only
from services.gateway.http.errors import renaming
from services.gateway.output.parts import CallArguments, CallBegin, Message, Part

Name = Annotated[str, Field(min_length=1, max_length=64)]
Id = Annotated[str, Field(min_length=1, max_length=MAX_ID)]
MODES: Mapping[str, gateway_pb2.ToolMode.ValueType] = {
    "auto": TOOL_MODE_AUTO,
    "none": TOOL_MODE_NONE,
    "required": TOOL_MODE_REQUIRED,
}


class Function(Body):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="JSON schema of the arguments, an object.")
    strict: bool | None = Field(None, description="Whether arguments obey it also where the model is free to call.")


class Tool(Body):
    type: Literal["function"]
    function: Function


class ChosenFunction(Body):
    name: Name


class ChosenTool(Body):
    type: Literal["function"]
    function: ChosenFunction


class WrittenFunction(Body):
    name: Name
    arguments: str


class WrittenCall(Body):
    """A call in an earlier message."""

    id: Id
    type: Literal["function"] = "function"
    function: WrittenFunction
    index: int | None = Field(default=None, description="As it was streamed; without a meaning here.")


Tools = Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)]
Calls = Annotated[list[WrittenCall], Field(fail_fast=True, max_length=MAX_CALLS)]


def branch_of(value: Any) -> str:
    """A choice is a word or an object. Branches are named as pydantic names them: errors leave them out."""
    return "dict[name]" if isinstance(value, dict | Body) else "str"


ToolChoice = Annotated[
    Annotated[Literal["auto", "none", "required"], Tag("str")] | Annotated[ChosenTool, Tag("dict[name]")],
    Discriminator(branch_of),
]


class TemplateArguments(Body):
    """Variables of the chat template; none but these."""

    enable_thinking: bool | None = Field(None, description="Whether the model thinks before it answers.")


class ToolFields(Body):
    """What a request says of tools and thinking."""

    tools: Tools | None = None
    tool_choice: ToolChoice | None = Field(None, description='By default "auto".')
    parallel_tool_calls: bool | None = Field(None, description="Whether there may be several calls. Default true.")
    functions: Annotated[Any, only([])] = None
    function_call: Annotated[Any, only("none", "auto")] = None
    reasoning_effort: Annotated[Any, only("none")] = Field(None, description='"none" is enable_thinking: false.')
    include_reasoning: bool | None = Field(None, description="Whether what the model thinks is told. Default true.")
    chat_template_kwargs: TemplateArguments | None = None


def tool_of(
    name: str, description: str | None, schema: dict[str, Any] | None, strict: bool | None, path: str
) -> gateway_pb2.Tool:
    """A tool of the engine's. Raises HttpError naming `path` for a schema that is nested too deeply."""
    text = ""
    if schema is not None:
        with renaming({}):
            check_nesting(path, schema)
        text = json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
    return gateway_pb2.Tool(name=name, description=description or "", parameters=text, strict=bool(strict))


def add_tools(chat: gateway_pb2.Chat, body: ToolFields) -> None:
    """What the request says of tools and thinking, into the chat."""
    for index, tool in enumerate(body.tools or ()):
        one, path = tool.function, f"tools[{index}].function.parameters"
        chat.tools.append(tool_of(one.name, one.description, one.parameters, one.strict, path))
    choice = body.tool_choice
    if isinstance(choice, str):
        chat.tool_mode = MODES[choice]
    elif choice is not None:
        chat.tool_mode, chat.tool_name = TOOL_MODE_REQUIRED, choice.function.name
    chat.single_call = body.parallel_tool_calls is False
    chat.split_reasoning = True
    said = None if body.chat_template_kwargs is None else body.chat_template_kwargs.enable_thinking
    if said is not None:
        chat.thinking = said
    elif body.reasoning_effort == "none":
        chat.thinking = False


def names_of(body: ToolFields) -> dict[str, str]:
    """Where the chat's fields come from."""
    said = body.chat_template_kwargs is not None and body.chat_template_kwargs.enable_thinking is not None
    tools = range(len(body.tools or ()))
    return {
        "chat.tools": "tools",
        "chat.tool_mode": "tool_choice",
        "chat.tool_name": "tool_choice",
        "chat.single_call": "parallel_tool_calls",
        "chat.thinking": "chat_template_kwargs.enable_thinking" if said else "reasoning_effort",
        **{f"chat.tools[{index}]": f"tools[{index}].function" for index in tools},
        **{f"chat.tools[{index}].parameters": f"tools[{index}].function.parameters" for index in tools},
    }


def call_of(call: WrittenCall) -> gateway_pb2.ToolCall:
    return gateway_pb2.ToolCall(id=call.id, name=call.function.name, arguments=call.function.arguments)


def missing_content() -> PydanticCustomError:
    return PydanticCustomError("missing_field", "field required", {"name": "content"})


def whole_calls(started: Started, choice: int, message: Message) -> list[dict[str, Any]]:
    """The calls of a whole answer."""
    return [
        {
            "id": call_id(started, choice, call.index),
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in message.calls
    ]


def call_deltas(started: Started, choice: int, parts: Iterable[Part]) -> list[dict[str, Any]]:
    """What is new of calls, an entry for each; a fault shows in the text that follows."""
    deltas: dict[int, dict[str, Any]] = {}
    for part in parts:
        if isinstance(part, CallBegin):
            function = {"name": part.name, "arguments": ""}
            name = call_id(started, choice, part.index)
            deltas[part.index] = {"index": part.index, "id": name, "type": "function", "function": function}
        elif isinstance(part, CallArguments):
            delta = deltas.setdefault(part.index, {"index": part.index, "function": {"arguments": ""}})
            delta["function"]["arguments"] += part.text
    return list(deltas.values())


def content_of(message: Message) -> str | None:
    """Null where there is nothing but calls or thinking."""
    return message.text if message.text or not (message.calls or message.reasoning) else None
