"""Bodies of /v1/responses, in its text subset with function tools, and what they say as a chat completion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from services.gateway.chat_checks import MAX_TOOLS
from services.gateway.http.body_types import Body, Ignored, by_type, only
from services.gateway.http.chat_view import view_job
from services.gateway.http.schemas import Int32, Message, ModelName, Number
from services.gateway.http.structured import JsonSchemaFormat, ResponseFormat
from services.gateway.http.to_input import Job
from services.gateway.http.tools import (
    ChosenFunction,
    ChosenTool,
    Function,
    Id,
    Name,
    Tool,
    WrittenCall,
    WrittenFunction,
    branch_of,
)
from services.gateway.validation import MAX_MESSAGES

Status = Annotated[str | None, Field(description="Without a meaning here.")]


class Part(Body):
    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: Ignored = None
    logprobs: Ignored = None


Parts = Annotated[list[Part], Field(fail_fast=True)]


class MessageItem(Body):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Parts
    id: str | None = None
    status: Status = None
    phase: Ignored = None


class CallItem(Body):
    type: Literal["function_call"]
    call_id: Id
    name: Name
    arguments: str
    id: str | None = None
    status: Status = None


class ResultItem(Body):
    type: Literal["function_call_output"]
    call_id: Id
    output: str | Parts
    id: str | None = None
    status: Status = None


class ReasoningPart(Body):
    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(Body):
    type: Literal["reasoning"]
    id: str | None = None
    summary: Ignored = None
    content: Annotated[list[ReasoningPart], Field(fail_fast=True)] | None = None
    encrypted_content: Annotated[Any, only("")] = None
    status: Status = None


Item = Annotated[
    Annotated[MessageItem, Tag("dict[message]")]
    | Annotated[CallItem, Tag("dict[function_call]")]
    | Annotated[ResultItem, Tag("dict[function_call_output]")]
    | Annotated[ReasoningItem, Tag("dict[reasoning]")],
    by_type("message", "items"),
]
Items = Annotated[list[Item], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]


class FunctionTool(Function):
    type: Literal["function"]


class ChosenByName(Body):
    type: Literal["function"]
    name: Name


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Field(max_length=256)] | None = None
    description: Ignored = None
    schema_: dict[str, Any] | None = Field(None, alias="schema", description='Of type "json_schema".')
    strict: Annotated[bool | None, Field(description="The schema is enforced either way.")] = None


class TextOptions(Body):
    format: TextFormat | None = None
    verbosity: Annotated[Any, only("medium")] = None


class ReasoningOptions(Body):
    effort: Annotated[Any, only("none")] = Field(None, description='"none" keeps a model from thinking.')
    summary: Ignored = None
    generate_summary: Ignored = None


class ResponsesRequest(Body):
    """Nothing is stored: what came before goes into `input`."""

    model: ModelName = ""
    input: str | Items
    instructions: str | None = None
    stream: bool | None = None
    stream_options: Ignored = None
    max_output_tokens: Int32 | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: Annotated[list[FunctionTool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: (
        Annotated[
            Annotated[Literal["auto", "none", "required"], Tag("str")] | Annotated[ChosenByName, Tag("dict[name]")],
            Discriminator(branch_of),
        ]
        | None
    ) = None
    parallel_tool_calls: bool | None = None
    priority: Int32 | None = Field(None, description="As in chat completions.")
    speculation: str | int | None = Field(None, description="As in chat completions.")

    store: Ignored = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    include: Ignored = None
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None
    truncation: Annotated[Any, only("disabled")] = None
    background: Annotated[Any, only(False)] = None
    previous_response_id: Annotated[Any, only()] = None
    conversation: Annotated[Any, only()] = None
    prompt: Annotated[Any, only()] = None
    max_tool_calls: Annotated[Any, only()] = None
    top_logprobs: Annotated[Any, only(0)] = None


def responses_job(body: ResponsesRequest) -> tuple[ResponsesRequest, Job]:
    """Raises HttpError naming the field where fields contradict each other."""
    messages, origins = _messages(body)
    fields = {
        "messages": "input",
        **{f"messages[{index}]": origin for index, origin in enumerate(origins)},
        **{f"tools[{index}].function": f"tools[{index}]" for index in range(len(body.tools or ()))},
        "max_completion_tokens": "max_output_tokens",
        "response_format": "text.format",
        "response_format.json_schema": "text.format.schema",
        "response_format.json_schema.schema": "text.format.schema",
        "reasoning_effort": "reasoning.effort",
    }
    chat = {
        "model": body.model,
        "messages": messages,
        "stream": body.stream,
        "max_completion_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "response_format": _format(body.text.format if body.text is not None else None),
        "reasoning_effort": body.reasoning.effort if body.reasoning is not None else None,
        "tools": [Tool(type="function", function=_function(tool)) for tool in body.tools or ()],
        "tool_choice": _choice(body.tool_choice),
        "parallel_tool_calls": body.parallel_tool_calls,
        "priority": body.priority,
        "speculation": body.speculation,
    }
    return body, view_job(chat, fields)


def _messages(body: ResponsesRequest) -> tuple[list[Message], list[str]]:
    """Messages, and which field each begins with. Thinking and calls belong to the assistant's next message."""
    messages: list[Message] = []
    origins: list[str] = []

    def add(message: Message, origin: str) -> None:
        messages.append(message)
        origins.append(origin)

    if body.instructions is not None:
        add(Message(role="system", content=body.instructions), "instructions")
    if isinstance(body.input, str):
        add(Message(role="user", content=body.input), "input")
        return messages, origins
    thought = ""
    for index, item in enumerate(body.input):
        origin = f"input[{index}]"
        match item:
            case ReasoningItem():
                thought = "".join(part.text for part in item.content or ())
                continue
            case MessageItem():
                said = Message(role=item.role, content=_text(item.content))
            case ResultItem():
                said = Message(role="tool", content=_text(item.output), tool_call_id=item.call_id)
            case CallItem():
                function = WrittenFunction(name=item.name, arguments=item.arguments)
                call = WrittenCall(id=item.call_id, function=function)
                last = messages[-1] if messages else None
                if last is not None and last.role == "assistant" and not thought:
                    last.tool_calls = [*(last.tool_calls or ()), call]
                    continue
                said = Message(role="assistant", content="", tool_calls=[call])
        if said.role == "assistant" and thought:
            said.reasoning_content = thought
        thought = ""
        add(said, origin)
    return messages, origins


def _text(content: str | Sequence[Part]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def _function(tool: FunctionTool) -> Function:
    return Function(name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict)


def _choice(choice: str | ChosenByName | None) -> Any:
    if isinstance(choice, ChosenByName):
        return ChosenTool(type="function", function=ChosenFunction(name=choice.name))
    return choice


def _format(wanted: TextFormat | None) -> ResponseFormat | None:
    if wanted is None:
        return None
    schema = None if wanted.schema_ is None else JsonSchemaFormat(name=wanted.name, schema=wanted.schema_)
    return ResponseFormat(type=wanted.type, json_schema=schema)
