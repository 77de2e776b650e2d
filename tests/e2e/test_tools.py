"""Tools through the four services: forced calls obey their schemas, whether marks are special tokens or text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai import OpenAI

from tests.e2e.stack import Stack
from tests.fixtures.chat_templates import HERMES
from tests.fixtures.models import make_rand_model
from tests.fixtures.vocabularies import FIRST_EXTRA_ID, byte_level, special

MARKS = ("<tool_call>", "</tool_call>")
PLACE = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "parameters": PLACE}},
    {"type": "function", "function": {"name": "now"}},
]
HI: list[Any] = [{"role": "user", "content": "Hi"}]


def is_right(name: str, arguments: str) -> bool:
    value = json.loads(arguments)
    if name == "now":
        return bool(value == {})
    return value["city"] in ("Paris", "Rome") and 1 <= value["days"] <= 9 and len(value) == 2


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The first mark is a special token, the second one a plain one, and those of thinking are none."""
    words = byte_level(MARKS)
    words.tokenizer["added_tokens"].append(special(FIRST_EXTRA_ID, MARKS[0]))
    path = tmp_path_factory.mktemp("tools")
    with Stack(make_rand_model(path, seed=8, vocabulary=words, chat_template=HERMES)) as stack:
        yield stack


def client(stack: Stack) -> OpenAI:
    return OpenAI(base_url=f"{stack.http}/v1", api_key="unused", max_retries=0)


def test_chat_completions(stack: Stack) -> None:
    """Forced calls, whole and streamed the same, and the conversation that goes on.

    A model of random weights would never end thinking, so it is told not to begin.
    """
    asked: dict[str, Any] = {"model": "tiny", "messages": HI, "tools": TOOLS, "seed": 3, "reasoning_effort": "none"}
    forced = asked | {"tool_choice": "required", "parallel_tool_calls": False}
    whole = client(stack).chat.completions.create(**forced)
    [choice] = whole.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    [call] = choice.message.tool_calls or ()
    assert call.type == "function"
    assert is_right(call.function.name, call.function.arguments)
    with client(stack).chat.completions.stream(**forced) as stream:
        last = stream.get_final_completion().choices[0]
    [again] = last.message.tool_calls or ()
    assert (again.function.name, again.function.arguments) == (call.function.name, call.function.arguments)
    assert last.finish_reason == "tool_calls"

    result = {"role": "tool", "tool_call_id": call.id, "content": "so"}
    said = choice.message.model_dump(exclude_none=True)
    named = {"type": "function", "function": {"name": "now"}}
    more = client(stack).chat.completions.create(
        **asked | {"messages": [*HI, said, result], "tool_choice": named, "n": 3}
    )
    for one in more.choices:
        [made] = one.message.tool_calls or ()
        assert made.type == "function"
        assert made.function.name == "now"
        assert is_right("now", made.function.arguments)


def test_the_other_apis(stack: Stack) -> None:
    tool: Any = {"type": "function", "name": "weather", "parameters": PLACE, "strict": True}
    with client(stack).responses.stream(
        model="tiny",
        input="Hi",
        tools=[tool],
        tool_choice="required",
        parallel_tool_calls=False,
        reasoning={"effort": "none"},
    ) as stream:
        response = stream.get_final_response()
    [item] = response.output
    assert item.type == "function_call"
    assert is_right(item.name, item.arguments)
    body = {
        "model": "tiny",
        "max_tokens": 512,
        "messages": HI,
        "thinking": {"type": "disabled"},
        "tools": [{"name": "weather", "input_schema": PLACE}],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    }
    answer = httpx.post(f"{stack.http}/v1/messages", json=body, headers={"x-api-key": "unused"}, timeout=60).json()
    [block] = answer["content"]
    assert (block["type"], answer["stop_reason"]) == ("tool_use", "tool_use")
    assert is_right("weather", json.dumps(block["input"]))
