"""Bodies of /v1/messages (Anthropic's), in its text subset with the client's tools, and what they say as a chat
completion."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from services.gateway.chat_checks import MAX_TOOLS
from services.gateway.http.body_types import Body, Ignored, by_type, only
from services.gateway.http.chat_view import view_job
from services.gateway.http.errors import bad_request
from services.gateway.http.schemas import Int32, Message, ModelName, Number, Strings
from services.gateway.http.to_input import Job
from services.gateway.http.tools import (
    ChosenFunction,
    ChosenTool,
    Function,
    Id,
    Name,
    TemplateArguments,
    Tool,
    WrittenCall,
    WrittenFunction,
)
from services.gateway.validation import MAX_MESSAGES


class TextBlock(Body):
    type: Literal["text"]
    text: str
    cache_control: Ignored = None
    citations: Ignored = None


class ToolUse(Body):
    type: Literal["tool_use"]
    id: Id
    name: Name
    input: dict[str, Any]
    cache_control: Ignored = None
    caller: Ignored = None


TextBlocks = Annotated[list[TextBlock], Field(fail_fast=True)]


class ToolResult(Body):
    type: Literal["tool_result"]
    tool_use_id: Id
    content: str | TextBlocks = ""
    is_error: Ignored = None
    cache_control: Ignored = None


class ThinkingBlock(Body):
    type: Literal["thinking"]
    thinking: str
    signature: Ignored = None


Block = Annotated[
    Annotated[TextBlock, Tag("dict[text]")]
    | Annotated[ToolUse, Tag("dict[tool_use]")]
    | Annotated[ToolResult, Tag("dict[tool_result]")]
    | Annotated[ThinkingBlock, Tag("dict[thinking]")],
    by_type("text", "blocks"),
]


class Turn(Body):
    role: Literal["user", "assistant"]
    content: str | Annotated[list[Block], Field(fail_fast=True, min_length=1)]


class ClientTool(Body):
    type: Annotated[Any, only("custom")] = None
    name: Name
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: Ignored = None


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = Field(None, description='Of type "tool".')
    disable_parallel_tool_use: bool | None = None


class ThinkingOptions(Body):
    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[Int32 | None, Field(description="Without effect: a model thinks as long as it does.")] = (
        None
    )
    display: Ignored = None


class TokenCountRequest(Body):
    """What of a message counts as input."""

    model: ModelName = ""
    messages: Annotated[list[Turn], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    system: str | TextBlocks | None = None
    tools: Annotated[list[ClientTool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingOptions | None = Field(None, description="What a model thinks is shown where this is not off.")


class MessagesRequest(TokenCountRequest):
    max_tokens: Int32 = Field(description="At most so many tokens; fewer where the context leaves less.")
    stop_sequences: Strings | None = None
    stream: bool | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: Int32 | None = None
    metadata: Ignored = None
    service_tier: Ignored = None


def messages_job(body: MessagesRequest) -> tuple[MessagesRequest, Job]:
    """Raises HttpError naming the field where fields contradict each other."""
    sampling = {"temperature": body.temperature, "top_p": body.top_p, "top_k": body.top_k}
    budget = {"max_tokens": body.max_tokens, "stop": body.stop_sequences, "stream": body.stream}
    job = _job(body, sampling | budget)
    shown = body.thinking is not None and body.thinking.type != "disabled"
    return body, replace(job, default_budget=True, show_reasoning=shown)


def count_job(body: TokenCountRequest) -> Job:
    """The chat whose tokens are to be counted, as a job."""
    return _job(body, {})


def _job(body: TokenCountRequest, more: dict[str, Any]) -> Job:
    messages: list[Message] = []
    fields: dict[str, str] = {}
    if body.system is not None:
        messages.append(Message(role="system", content=_text(body.system)))
        fields["messages[0]"] = "system"
    for index, turn in enumerate(body.messages):
        for message in _messages(turn, f"messages[{index}]"):
            fields[f"messages[{len(messages)}]"] = f"messages[{index}]"
            messages.append(message)
    if body.messages[-1].role == "assistant":
        last = f"messages[{len(body.messages) - 1}].role"
        raise bad_request(last, "must be user: an assistant's message cannot be continued")
    fields |= {
        **{f"tools[{index}].function": f"tools[{index}]" for index in range(len(body.tools or ()))},
        **{
            f"tools[{index}].function.parameters": f"tools[{index}].input_schema"
            for index in range(len(body.tools or ()))
        },
        **{f"tools[{index}].function.name": f"tools[{index}].name" for index in range(len(body.tools or ()))},
        "stop": "stop_sequences",
        "chat_template_kwargs.enable_thinking": "thinking",
    }
    chat = {
        "model": body.model,
        "messages": messages,
        "tools": [_tool(tool) for tool in body.tools or ()],
        "tool_choice": _choice(body.tool_choice),
        "parallel_tool_calls": not (body.tool_choice and body.tool_choice.disable_parallel_tool_use),
        "chat_template_kwargs": _thinking(body.thinking),
        **more,
    }
    return view_job(chat, fields)


def _messages(turn: Turn, path: str) -> Iterator[Message]:
    """A turn's messages: results of tools stand for themselves, and the rest of each is one."""
    if isinstance(turn.content, str):
        yield Message(role=turn.role, content=turn.content)
        return
    texts: list[str] = []
    calls: list[WrittenCall] = []
    thought: list[str] = []
    for number, block in enumerate(turn.content):
        if isinstance(block, ToolUse | ThinkingBlock) and turn.role != "assistant":
            raise bad_request(f"{path}.content[{number}]", f"{block.type} belongs to the assistant")
        match block:
            case TextBlock():
                texts.append(block.text)
            case ToolUse():
                function = WrittenFunction(name=block.name, arguments=json.dumps(block.input, ensure_ascii=False))
                calls.append(WrittenCall(id=block.id, function=function))
            case ThinkingBlock():
                thought.append(block.thinking)
            case ToolResult():
                if turn.role != "user":
                    raise bad_request(f"{path}.content[{number}]", "tool_result belongs to the user")
                if texts:
                    yield Message(role="user", content="\n".join(texts))
                    texts = []
                yield Message(role="tool", content=_text(block.content), tool_call_id=block.tool_use_id)
    if texts or calls or thought:
        reasoning = "\n".join(thought) or None
        yield Message(role=turn.role, content="\n".join(texts), tool_calls=calls or None, reasoning_content=reasoning)


def _text(content: str | Sequence[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def _tool(tool: ClientTool) -> Tool:
    function = Function(name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict)
    return Tool(type="function", function=function)


def _choice(choice: ToolChoice | None) -> Any:
    if choice is None:
        return None
    if (choice.type == "tool") != (choice.name is not None):
        raise bad_request("tool_choice.name", 'goes with type "tool", which needs it')
    if choice.name is not None:
        return ChosenTool(type="function", function=ChosenFunction(name=choice.name))
    return {"auto": "auto", "any": "required", "none": "none"}[choice.type]


def _thinking(options: ThinkingOptions | None) -> TemplateArguments | None:
    if options is None or options.type == "adaptive":
        return None
    return TemplateArguments(enable_thinking=options.type == "enabled")
