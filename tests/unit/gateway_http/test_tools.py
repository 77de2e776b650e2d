"""Tools and thinking in chat completions."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from quire.v1 import gateway_pb2
from services.gateway.output.template_facts import Style, TemplateFacts
from tests.unit.gateway_http.fake_engine import FakeEngine
from tests.unit.gateway_http.test_answers import events

FACTS = TemplateFacts(True, Style.HERMES, shows_calls=True, thinks=True, switches_thinking=True)
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Weather of a city", "parameters": CITY}}
HI = {"messages": [{"role": "user", "content": "hi"}], "tools": [WEATHER]}
CALL = ["<tool_", 'call>\n{"name": "weather", "argu', 'ments": {"city": ', '"Paris"}', "}\n</tool_call>"]
PATH = "/v1/chat/completions"


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(facts=FACTS, ends_itself=True)


async def whole(client: httpx.AsyncClient, body: dict[str, Any]) -> Any:
    response = await client.post(PATH, json=body)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


async def streamed(client: httpx.AsyncClient, body: dict[str, Any]) -> list[Any]:
    *chunks, done = events(await client.post(PATH, json=body | {"stream": True}))
    assert done == "[DONE]"
    return [chunk["choices"][0] for chunk in chunks]


async def test_a_call(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.pieces = CALL
    choice = await whole(client, HI)
    [call] = choice["message"]["tool_calls"]
    assert choice["message"]["content"] is None
    assert choice["finish_reason"] == "tool_calls"
    assert call["id"].startswith("call_")
    assert call | {"id": ""} == {
        "id": "",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "Paris"}'},
    }
    [tool] = engine.requests[0].chat.tools
    assert (tool.name, tool.description, json.loads(tool.parameters)) == ("weather", "Weather of a city", CITY)
    assert engine.constraints == [None]


async def test_a_streamed_call(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    """The name first, then the arguments as they are written; text before it is text."""
    engine.pieces = ["Look.", "\n", *CALL]
    first, *chunks = await streamed(client, HI)
    assert first["delta"] == {"role": "assistant", "content": ""}
    deltas = [chunk["delta"] for chunk in chunks]
    assert deltas[0] == {"content": "Look."}
    [begin] = deltas[1]["tool_calls"]
    assert begin["id"].startswith("call_")
    assert (begin["index"], begin["type"]) == (0, "function")
    assert begin["function"] == {"name": "weather", "arguments": '{"city": '}
    assert deltas[2:] == [{"tool_calls": [{"index": 0, "function": {"arguments": '"Paris"}'}}]}, {}]
    assert [chunk["finish_reason"] for chunk in chunks] == [None, None, None, "tool_calls"]


async def test_several_choices_name_their_calls_apart(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.pieces = [*CALL, "\n", *CALL]
    body = (await client.post(PATH, json=HI | {"n": 2})).json()
    ids = [call["id"] for choice in body["choices"] for call in choice["message"]["tool_calls"]]
    assert len(set(ids)) == 4


@pytest.mark.parametrize(
    "pieces",
    [
        ['<tool_call>{"name": "weather", "arguments": {"city": ]', "}}</tool_call>"],
        ['<tool_call>{"name": "other", "arguments": {}}', "</tool_call>"],
        ['<tool_call>{"name": "weather", "arguments": {"ci'],
        ["<tool_call>", "no JSON"],
    ],
)
async def test_a_malformed_call_is_text(client: httpx.AsyncClient, engine: FakeEngine, pieces: list[str]) -> None:
    engine.pieces = pieces
    choice = await whole(client, HI)
    assert choice["message"] == {"role": "assistant", "content": "".join(pieces), "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert (await streamed(client, HI))[-1]["finish_reason"] == "stop"


async def test_a_call_that_its_budget_cuts_off(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.pieces = CALL
    choice = await whole(client, HI | {"max_tokens": 3})
    assert choice["message"]["content"] == "".join(CALL[:3])
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("fields", "mode", "forced"),
    [
        ({}, gateway_pb2.TOOL_MODE_UNSPECIFIED, False),
        ({"tool_choice": "auto"}, gateway_pb2.TOOL_MODE_AUTO, False),
        ({"tool_choice": "required"}, gateway_pb2.TOOL_MODE_REQUIRED, True),
        ({"tool_choice": {"type": "function", "function": {"name": "weather"}}}, gateway_pb2.TOOL_MODE_REQUIRED, True),
        ({"parallel_tool_calls": False}, gateway_pb2.TOOL_MODE_UNSPECIFIED, True),
        ({"tools": [{"type": "function", "function": WEATHER["function"] | {"strict": True}}]}, 0, True),  # type: ignore[operator]
    ],
)
async def test_choices(
    client: httpx.AsyncClient, engine: FakeEngine, fields: dict[str, Any], mode: int, forced: bool
) -> None:
    engine.pieces = CALL
    await whole(client, HI | fields)
    assert engine.requests[0].chat.tool_mode == mode
    [constraint] = engine.constraints
    assert (constraint is not None) is forced
    if constraint is not None:
        assert "weather" in constraint.grammar


async def test_tools_that_may_not_be_called(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    """Nothing is looked for, and nothing hidden."""
    engine.pieces = CALL
    choice = await whole(client, HI | {"tool_choice": "none"})
    assert choice["message"]["content"] == "".join(CALL)
    assert choice["finish_reason"] == "stop"


async def test_a_conversation_with_results(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    """What an answer said goes back as it was."""
    engine.pieces = CALL
    said = (await whole(client, HI))["message"]
    result = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "17 degrees"}
    engine.pieces = ["Nice."]
    choice = await whole(client, HI | {"messages": [*HI["messages"], said, result]})
    assert choice["message"] == {"role": "assistant", "content": "Nice.", "refusal": None}
    _, assistant, tool = engine.requests[1].chat.messages
    assert (assistant.content, assistant.tool_calls[0].name) == ("", "weather")
    assert json.loads(assistant.tool_calls[0].arguments) == {"city": "Paris"}
    assert tool.tool_call_id == assistant.tool_calls[0].id


@pytest.mark.parametrize("include", [None, True, False])
async def test_thinking(client: httpx.AsyncClient, engine: FakeEngine, include: bool | None) -> None:
    engine.pieces = ["<think>", "Hm", "m", "</think>", "Yes", "."]
    body = {"messages": HI["messages"], "include_reasoning": include}
    response = (await client.post(PATH, json=body)).json()
    message = response["choices"][0]["message"]
    shown = include is not False
    assert message.get("reasoning_content") == ("Hmm" if shown else None)
    assert message["content"] == "Yes."
    assert response["usage"]["completion_tokens_details"] == {"reasoning_tokens": 4}
    deltas = [chunk["delta"] for chunk in await streamed(client, body)]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == ("Hmm" if shown else "")
    assert "".join(delta.get("content", "") for delta in deltas) == "Yes."


async def test_thinking_that_the_prompt_opened(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.prompt_end = "<think>\n"
    engine.pieces = ["Hm", "</think>", "Yes."]
    wanted = {"response_format": {"type": "json_object"}}
    message = (await whole(client, {"messages": HI["messages"]} | wanted))["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm", "Yes.")
    [constraint] = engine.constraints
    assert constraint is not None
    assert "thinking" in constraint.grammar
    engine.pieces = ["Hm"]
    message = (await whole(client, {"messages": HI["messages"]}))["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm", None)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({}, None),
        ({"chat_template_kwargs": {}}, None),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False),
        ({"chat_template_kwargs": {"enable_thinking": True}}, True),
        ({"reasoning_effort": "none"}, False),
    ],
)
async def test_telling_a_model_to_think(
    client: httpx.AsyncClient, engine: FakeEngine, fields: dict[str, Any], told: bool | None
) -> None:
    await whole(client, HI | fields)
    [request] = engine.requests
    assert (request.chat.thinking if request.chat.HasField("thinking") else None) is told


def function(**fields: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f"} | fields}]}


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"properties": {"a": schema}}
    return schema


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (function(name=""), "tools[0].function.name"),
        (function(name="x" * 65), "tools[0].function.name"),
        (function(name="a b"), "tools[0].function.name"),
        (function(name="é"), "tools[0].function.name"),
        (function(parameters=[]), "tools[0].function.parameters"),
        (function(parameters={"type": "string"}), "tools[0].function.parameters"),
        (function(parameters=deep(70)), "tools[0].function.parameters"),
        (function(parameters={"description": "x" * 70_000}), "tools[0].function.parameters"),
        (function(odd=1), "tools[0].function.odd"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].function.name"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(129)]}, "tools"),
        ({"tools": {}}, "tools"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.type"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"use_beam_search": True, "guided_grammar": "x"}, "guided_grammar"),
        ({"guided_grammar": 'root ::= "a"'}, "guided_grammar"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_bad_tools(
    client: httpx.AsyncClient, engine: FakeEngine, fields: dict[str, Any], param: str, stream: bool
) -> None:
    response = await client.post(PATH, json=HI | fields | {"stream": stream})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert error["message"].startswith(f"{param}: ")
    assert not engine.requests


@pytest.mark.parametrize(
    ("call", "result", "param"),
    [
        ({"arguments": "{"}, {}, "messages[1].tool_calls[0].arguments"),
        ({"arguments": "[]"}, {}, "messages[1].tool_calls[0].arguments"),
        ({"arguments": "[" * 100_000}, {}, "messages[1].tool_calls[0].arguments"),
        ({"arguments": {}}, {}, "messages[1].tool_calls[0].function.arguments"),
        ({"name": "a b"}, {}, "messages[1].tool_calls[0].name"),
        ({}, {"tool_call_id": "2"}, "messages[2].tool_call_id"),
        ({}, {"tool_call_id": None}, "messages[2].tool_call_id"),
        ({}, {"content": None}, "messages[2].content"),
    ],
)
async def test_bad_calls_in_messages(
    client: httpx.AsyncClient, engine: FakeEngine, call: dict[str, Any], result: dict[str, Any], param: str
) -> None:
    written = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{}"} | call}
    messages = [
        *HI["messages"],
        {"role": "assistant", "content": None, "tool_calls": [written]},
        {"role": "tool", "tool_call_id": "1", "content": "x"} | result,
    ]
    response = await client.post(PATH, json=HI | {"messages": messages})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert not engine.requests


async def test_tokenize_counts_with_tools(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    assert (await client.post("/tokenize", json=HI)).status_code == 200
    engine.facts = TemplateFacts()
    refused = await client.post("/tokenize", json=HI)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools")
