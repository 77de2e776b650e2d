"""What a chat's output must obey: the request's own rule, calls that are forced, arguments that are strict. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from quire.v1 import gateway_pb2
from quire.v1.types_pb2 import Constraint
from services.common.constraints.limits import MAX_RULE_BYTES, rule_path
from services.common.errors import QuireError, Reason, invalid
from services.gateway.chat_plan import Reading
from services.gateway.output.grammar import Shape, behind_thinking, calls_grammar, json_of, text_of
from services.gateway.output.template_facts import Style
from services.gateway.output.thinking import Thinking

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_ODD = re.compile(r"\\.|/|\n|::=", re.DOTALL)


def enforced_schemas(chat: gateway_pb2.Chat) -> Iterator[tuple[str, str]]:
    """(path, JSON text) of the schemas that the output's calls must obey."""
    for index, tool in enumerate(chat.tools):
        if _may_be_called(chat, tool) and (_forced(chat) or tool.strict) and tool.parameters:
            yield f"chat.tools[{index}].parameters", tool.parameters


def output_rule(
    chat: gateway_pb2.Chat, reading: Reading, own: Constraint | None, special: Collection[str]
) -> Constraint | None:
    """The rule for the whole output, `own` where that is it. UNSUPPORTED where `own` does not go with the rest.

    `special`: texts of the model's special tokens.
    """
    size = sum(len(schema.encode()) for _, schema in enforced_schemas(chat))
    if size > MAX_RULE_BYTES:  # before any is read
        raise invalid("chat.tools", f"schemas that are enforced have {size} bytes, {MAX_RULE_BYTES} are the limit")
    guided = _forced(chat) or chat.single_call or any(tool.strict for tool in chat.tools)
    if reading.style is not None and (guided or own is not None):
        answer = None if own is None or _forced(chat) else _answer(own, "tools that the model may call")
        if answer is not None and reading.style is Style.LLAMA:
            # Its calls begin as JSON answers do, and a lexer has to tell them apart at once.
            raise _refusal(own, "tools that this model may call")
        tools = {tool.name: _schema(chat, tool) for tool in chat.tools if _may_be_called(chat, tool)}
        shape = Shape(tools, _forced(chat), several=not (chat.single_call or chat.tool_name))
        return Constraint(grammar=calls_grammar(reading.style, shape, reading.thinking, special, answer))
    if own is not None and reading.thinking is Thinking.OPEN:
        return Constraint(grammar=behind_thinking(_answer(own, "a model that thinks first"), special))
    return own


def _forced(chat: gateway_pb2.Chat) -> bool:
    return chat.tool_mode == gateway_pb2.TOOL_MODE_REQUIRED


def _may_be_called(chat: gateway_pb2.Chat, tool: gateway_pb2.Tool) -> bool:
    return chat.tool_name in ("", tool.name)


def _schema(chat: gateway_pb2.Chat, tool: gateway_pb2.Tool) -> Mapping[str, Any]:
    if not _forced(chat) and not tool.strict:
        return ANY_OBJECT
    if not tool.parameters:
        return NO_ARGUMENTS
    schema: dict[str, Any] = json.loads(tool.parameters)
    return {"type": "object"} | schema


def _answer(own: Constraint, beside: str) -> list[str]:
    """The rule as lines of a grammar that define `answer`."""
    match own.WhichOneof("rule"):
        case "json_schema":
            return [f"answer: {json_of(json.loads(own.json_schema))}"]
        case "json_object":
            return [f"answer: {json_of(ANY_OBJECT)}"]
        case "choice":
            return [f"answer: {' | '.join(map(text_of, own.choice.values))}"]
        case "regex":
            return ["answer: ANSWER", f"ANSWER: /{_ODD.sub(_escaped, own.regex)}/"]
        case _:
            raise _refusal(own, beside)


def _refusal(own: Constraint | None, beside: str) -> QuireError:
    path = "constraint" if own is None else rule_path(own)
    return QuireError(Reason.UNSUPPORTED, f"{path}: does not go with {beside}", field=path)


def _escaped(found: re.Match[str]) -> str:
    return {"/": r"\/", "\n": r"\n", "::=": r"\x3A:="}.get(found[0], found[0])
