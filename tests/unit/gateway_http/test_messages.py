"""/v1/messages: blocks in, blocks out, the order of its events, and failures in Anthropic's shape."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from quire.v1 import gateway_pb2
from services.common.errors import QuireError, Reason
from services.gateway.output.template_facts import TemplateFacts
from tests.unit.gateway_http.fake_engine import FakeEngine
from tests.unit.gateway_http.test_tools import CALL, CITY, FACTS

PATH = "/v1/messages"
TOOL = {"name": "weather", "description": "Weather of a city", "input_schema": CITY}
HI = {"max_tokens": 40, "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(facts=FACTS, ends_itself=True)


def events(response: httpx.Response) -> list[dict[str, Any]]:
    found = []
    for block in response.text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


async def test_whole(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.pieces = ["Hello", ", world"]
    body = HI | {"system": [{"type": "text", "text": "Be brief."}], "top_k": 5, "metadata": {"user_id": "me"}}
    answer = (await client.post(PATH, json=body, headers={"x-request-id": "r"})).json()
    assert answer == {
        "id": "msg_r",
        "type": "message",
        "role": "assistant",
        "model": "test/model",
        "content": [{"type": "text", "text": "Hello, world", "citations": None}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 8,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 3,
            "output_tokens": 2,
        },
    }
    [request] = engine.requests
    assert [(message.role, message.content) for message in request.chat.messages] == [
        ("system", "Be brief."),
        ("user", "hi"),
    ]
    assert (request.stop.max_tokens, request.sampling.top_k) == (40, 5)


@pytest.mark.parametrize(
    ("fields", "reason", "sequence"),
    [
        ({"stop_sequences": ["wor"]}, "stop_sequence", "wor"),
        ({"max_tokens": 2}, "max_tokens", None),
        ({"max_tokens": 10_000}, "end_turn", None),  # fewer where the context leaves less
    ],
)
async def test_ends(
    client: httpx.AsyncClient, engine: FakeEngine, fields: dict[str, Any], reason: str, sequence: str | None
) -> None:
    answer = (await client.post(PATH, json=HI | fields)).json()
    assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, sequence)
    *_, delta, stop = events(await client.post(PATH, json=HI | fields | {"stream": True}))
    assert stop == {"type": "message_stop"}
    assert delta["delta"] == {"stop_reason": reason, "stop_sequence": sequence}


async def test_stream(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.pieces = ["<think>Hm", "m</think>", "Look", ".", *CALL]
    body = HI | {"tools": [TOOL], "thinking": {"type": "enabled", "budget_tokens": 1024}}
    found = events(await client.post(PATH, json=body | {"stream": True}))
    assert [one["type"] for one in found] == [
        "message_start",
        *("content_block_start", "content_block_delta", "content_block_delta", "content_block_stop"),
        *("content_block_start", "content_block_delta", "content_block_delta", "content_block_stop"),
        *("content_block_start", "content_block_delta", "content_block_delta", "content_block_stop"),
        "message_delta",
        "message_stop",
    ]
    assert found[0]["message"]["content"] == []
    assert found[0]["message"]["usage"]["output_tokens"] == 0
    starts = [one["content_block"] for one in found if one["type"] == "content_block_start"]
    assert starts[0] == {"type": "thinking", "thinking": "", "signature": ""}
    assert starts[1] == {"type": "text", "text": "", "citations": None}
    assert (starts[2]["type"], starts[2]["name"], starts[2]["input"]) == ("tool_use", "weather", {})
    assert starts[2]["id"].startswith("toolu_")
    deltas = [(one["index"], one["delta"]) for one in found if one["type"] == "content_block_delta"]
    assert "".join(delta["thinking"] for index, delta in deltas if index == 0) == "Hmm"
    assert "".join(delta["text"] for index, delta in deltas if index == 1) == "Look."
    assert json.loads("".join(delta["partial_json"] for index, delta in deltas if index == 2)) == {"city": "Paris"}
    assert found[-2]["delta"]["stop_reason"] == "tool_use"
    assert found[-2]["usage"]["output_tokens"] == 9

    whole = (await client.post(PATH, json=body)).json()
    assert [block["type"] for block in whole["content"]] == ["thinking", "text", "tool_use"]
    assert whole["content"][2]["input"] == {"city": "Paris"}
    hidden = (await client.post(PATH, json=HI | {"tools": [TOOL]})).json()
    assert [block["type"] for block in hidden["content"]] == ["text", "tool_use"]


async def test_a_conversation_with_results(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.pieces = ["Look.", *CALL]
    said = (await client.post(PATH, json=HI | {"tools": [TOOL]})).json()["content"]
    result = {"type": "tool_result", "tool_use_id": said[1]["id"], "content": [{"type": "text", "text": "17"}]}
    thinking = {"type": "thinking", "thinking": "Hm", "signature": ""}
    turns = [
        *HI["messages"],  # type: ignore[misc]
        {"role": "assistant", "content": [thinking, *said]},
        {"role": "user", "content": [result, {"type": "text", "text": "So?", "cache_control": {"type": "ephemeral"}}]},
    ]
    response = await client.post(PATH, json=HI | {"messages": turns, "tools": [TOOL]})
    assert response.status_code == 200, response.text
    messages = engine.requests[1].chat.messages
    assert [(message.role, message.content) for message in messages] == [
        ("user", "hi"),
        ("assistant", "Look."),
        ("tool", "17"),
        ("user", "So?"),
    ]
    assert messages[1].reasoning_content == "Hm"
    assert messages[1].tool_calls[0].id == messages[2].tool_call_id == said[1]["id"]


@pytest.mark.parametrize(
    ("choice", "mode", "single"),
    [
        ({"type": "auto"}, gateway_pb2.TOOL_MODE_AUTO, False),
        ({"type": "auto", "disable_parallel_tool_use": True}, gateway_pb2.TOOL_MODE_AUTO, True),
        ({"type": "any"}, gateway_pb2.TOOL_MODE_REQUIRED, False),
        ({"type": "tool", "name": "weather"}, gateway_pb2.TOOL_MODE_REQUIRED, False),
        ({"type": "none"}, gateway_pb2.TOOL_MODE_NONE, False),
    ],
)
async def test_choices(
    client: httpx.AsyncClient, engine: FakeEngine, choice: dict[str, Any], mode: int, single: bool
) -> None:
    assert (await client.post(PATH, json=HI | {"tools": [TOOL], "tool_choice": choice})).status_code == 200
    chat = engine.requests[0].chat
    assert (chat.tool_mode, chat.single_call, chat.tool_name) == (mode, single, choice.get("name", ""))


async def test_counting_tokens(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    body = {"messages": HI["messages"], "system": "abc"}
    answer = await client.post(f"{PATH}/count_tokens", json=body)
    assert answer.json() == {"input_tokens": 6}  # bytes, and one to begin with
    refused = await client.post(f"{PATH}/count_tokens", json=body | {"max_tokens": 5})
    assert refused.status_code == 400
    assert not engine.requests


@pytest.mark.parametrize(
    ("fields", "beginning"),
    [
        ({"max_tokens": None}, "max_tokens: "),
        ({"max_tokens": 0}, "max_tokens: "),
        ({"messages": []}, "messages: "),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages[0].role: "),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content: "),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "messages[0].role: "),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]}, "messages[0]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "x", "name": "f", "input": {}}]}]},
            "messages[0].content[0]: ",
        ),
        ({"stop_sequences": [""]}, "stop_sequences: "),
        ({"temperature": 1e9}, "temperature: "),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools[0].type: "),
        ({"tools": [TOOL | {"name": "a b"}]}, "tools[0].name: "),
        ({"tools": [TOOL | {"input_schema": {"type": "array"}}]}, "tools[0].input_schema: "),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name: "),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice: "),
        ({"tool_choice": {"type": "any"}}, "tool_choice: "),
        ({"container": "x"}, "container: "),
    ],
)
async def test_bad_input(client: httpx.AsyncClient, engine: FakeEngine, fields: dict[str, Any], beginning: str) -> None:
    response = await client.post(PATH, json=HI | fields, headers={"x-request-id": "r"})
    assert response.status_code == 400, response.text
    body = response.json()
    assert (body["type"], body["request_id"]) == ("error", "r")
    assert body["error"]["type"] == "invalid_request_error"
    assert body["error"]["message"].startswith(beginning), body
    assert not engine.requests


async def test_thinking_that_cannot_be_told(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.facts = TemplateFacts()
    refused = await client.post(PATH, json=HI | {"thinking": {"type": "enabled", "budget_tokens": 1024}})
    assert refused.json()["error"]["message"].startswith("thinking: ")
    assert (await client.post(PATH, json=HI | {"thinking": {"type": "disabled"}})).status_code == 200


@pytest.mark.parametrize(
    ("failure", "status", "kind"),
    [
        (QuireError(Reason.QUEUE_FULL, "full"), 429, "rate_limit_error"),
        (QuireError(Reason.EXECUTOR_LOST, "gone"), 503, "overloaded_error"),
        (QuireError(Reason.TOO_LARGE, "huge"), 413, "request_too_large"),
        (QuireError(Reason.MODEL_NOT_FOUND, "none"), 404, "not_found_error"),
        (RuntimeError("boom"), 500, "api_error"),
    ],
)
async def test_failures(
    client: httpx.AsyncClient, engine: FakeEngine, failure: Exception, status: int, kind: str
) -> None:
    """Before the first event with their status, in mid-stream as an event; never as an end."""

    def fail(*_: object, **__: object) -> Any:
        raise failure

    engine.fail_after, engine.failure = 2, failure
    found = events(await client.post(PATH, json=HI | {"stream": True}))
    assert found[-1]["error"]["type"] == kind
    assert "message_stop" not in [one["type"] for one in found]
    engine.generate = fail  # type: ignore[method-assign]
    response = await client.post(PATH, json=HI)
    assert (response.status_code, response.json()["error"]["type"]) == (status, kind)
    assert "boom" not in response.text
    assert (await client.get(PATH)).json()["error"]["type"] == "invalid_request_error"
