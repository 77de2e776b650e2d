"""/v1/responses: items in, items out, and the order of its events."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from services.gateway.output.template_facts import TemplateFacts
from tests.unit.gateway_http.fake_engine import FakeEngine
from tests.unit.gateway_http.test_tools import CALL, CITY, FACTS

PATH = "/v1/responses"
TOOL = {"type": "function", "name": "weather", "description": "", "parameters": CITY, "strict": False}


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(facts=FACTS, ends_itself=True)


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The data of each event; its name is its type, and events are numbered."""
    assert response.headers["content-type"].startswith("text/event-stream")
    found = []
    for block in response.text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    assert [one["sequence_number"] for one in found] == list(range(len(found)))
    return found


async def test_whole(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.pieces = ["Hello", ", world"]
    body = {"input": "hi", "instructions": "Be brief.", "max_output_tokens": 9, "temperature": 0.5, "user": "me"}
    answer = (await client.post(PATH, json=body, headers={"x-request-id": "r"})).json()
    [item] = answer["output"]
    assert item | {"id": ""} == {
        "id": "",
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": "Hello, world", "annotations": [], "logprobs": []}],
    }
    assert (answer["id"], answer["object"], answer["status"]) == ("resp_r", "response", "completed")
    assert (answer["instructions"], answer["max_output_tokens"], answer["temperature"]) == ("Be brief.", 9, 0.5)
    assert answer["usage"] == {
        "input_tokens": 11,
        "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
        "output_tokens": 2,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 13,
    }
    [request] = engine.requests
    assert [(message.role, message.content) for message in request.chat.messages] == [
        ("system", "Be brief."),
        ("user", "hi"),
    ]
    assert (request.stop.max_tokens, request.sampling.temperature) == (9, 0.5)


async def test_speculation_is_what_it_is_in_chat_completions(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    for stated, said in ((4, "4"), ("off", "off"), (None, "")):
        await client.post(PATH, json={"input": "hi", "speculation": stated})
        assert engine.requests.pop().speculation == said


async def test_a_cut_answer_is_incomplete(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    answer = (await client.post(PATH, json={"input": "hi", "max_output_tokens": 2})).json()
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    last = events(await client.post(PATH, json={"input": "hi", "max_output_tokens": 2, "stream": True}))[-1]
    assert (last["type"], last["response"]["status"]) == ("response.incomplete", "incomplete")


async def test_stream(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    """Thinking, text and a call, each opened, grown and closed in turn; the last event has the whole."""
    engine.pieces = ["<think>Hm", "m</think>", "Look", ".", *CALL]
    found = events(await client.post(PATH, json={"input": "hi", "tools": [TOOL], "stream": True}))
    assert [one["type"].removeprefix("response.") for one in found] == [
        "created",
        "in_progress",
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.delta"),
        *("reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done", "completed"),
    ]
    final = found[-1]["response"]
    assert [item["type"] for item in final["output"]] == ["reasoning", "message", "function_call"]
    done = [one for one in found if one["type"] == "response.output_item.done"]
    assert [one["item"] for one in done] == final["output"]
    assert [one["output_index"] for one in done] == [0, 1, 2]
    call = final["output"][2]
    assert (call["name"], json.loads(call["arguments"]), call["status"]) == ("weather", {"city": "Paris"}, "completed")
    text = [one["delta"] for one in found if one["type"] == "response.output_text.delta"]
    assert "".join(text) == final["output"][1]["content"][0]["text"] == "Look."
    whole = (await client.post(PATH, json={"input": "hi", "tools": [TOOL]})).json()
    assert [item["type"] for item in whole["output"]] == ["reasoning", "message", "function_call"]
    assert whole["output"][2]["arguments"] == call["arguments"]


async def test_an_empty_answer_has_a_message(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.pieces = [""]
    whole = (await client.post(PATH, json={"input": "hi"})).json()
    last = events(await client.post(PATH, json={"input": "hi", "stream": True}))[-1]["response"]
    for answer in (whole, last):
        assert [item["content"][0]["text"] for item in answer["output"]] == [""]


async def test_a_failure_in_mid_stream(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    """A7: a failed response, and no completed one."""
    engine.fail_after = 2
    *_, last = events(await client.post(PATH, json={"input": "hi", "stream": True}))
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"] == {"code": "server_error", "message": "the executor is gone"}


async def test_items(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    """An answer's items go back with the result of its call."""
    engine.pieces = ["<think>Hm</think>", *CALL]
    said = (await client.post(PATH, json={"input": "hi", "tools": [TOOL]})).json()["output"]
    result = {"type": "function_call_output", "call_id": said[-1]["call_id"], "output": "17 degrees"}
    parts = [{"type": "input_text", "text": "hi"}, {"type": "input_text", "text": "you"}]
    items = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}, *said, result]
    assert (await client.post(PATH, json={"input": items, "tools": [TOOL]})).status_code == 200
    messages = engine.requests[1].chat.messages
    assert [(message.role, message.content) for message in messages] == [
        ("system", "Be brief."),
        ("user", "hi\nyou"),
        ("assistant", ""),
        ("tool", "17 degrees"),
    ]
    assert messages[2].reasoning_content == "Hm"
    assert messages[2].tool_calls[0].id == messages[3].tool_call_id


async def test_formats(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    wanted = {"format": {"type": "json_schema", "name": "x", "schema": CITY, "strict": True}}
    answer = (await client.post(PATH, json={"input": "hi", "text": wanted})).json()
    assert answer["text"]["format"]["schema"] == CITY
    assert json.loads(engine.requests[0].constraint.json_schema) == CITY


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"speculation": 17}, "speculation"),
        ({"speculation": True}, "speculation"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"type": "function_call_output", "call_id": "x", "output": "y"}]}, "input[0].tool_call_id"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://127.0.0.1"}]}]}, None),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "text", "schema": {}}}}, "text.format.schema"),
        ({"tools": [{"type": "web_search", "name": "x"}]}, "tools[0].type"),
        ({"tools": [TOOL | {"name": "a b"}]}, "tools[0].name"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
        ({"odd": 1}, "odd"),
    ],
)
async def test_bad_input(
    client: httpx.AsyncClient, engine: FakeEngine, fields: dict[str, Any], param: str | None
) -> None:
    response = await client.post(PATH, json={"input": "hi"} | fields)
    assert response.status_code == 400, response.text
    if param is not None:
        assert response.json()["error"]["param"] == param
    assert not engine.requests


async def test_a_model_without_tools(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.facts = TemplateFacts()
    for fields, param in (({"tools": [TOOL]}, "tools"),):
        response = await client.post(PATH, json={"input": "hi"} | fields)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)
