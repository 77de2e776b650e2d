"""Tools, thinking and /v1/responses as the official client reads them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from services.gateway.http.server import HttpServer
from tests.unit.gateway_http.fake_engine import FakeEngine
from tests.unit.gateway_http.test_tools import CALL, CITY, FACTS, WEATHER

HI: list[Any] = [{"role": "user", "content": "hi"}]
TOOL: Any = {"type": "function", "name": "weather", "parameters": CITY, "strict": False}


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(facts=FACTS, ends_itself=True, pieces=["<think>Hm</think>", "Look.", *CALL])


@pytest.fixture
async def client(server: HttpServer) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"http://{server.address}/v1", api_key="none", max_retries=0) as client:
        yield client


class City(BaseModel):
    city: str


async def test_chat(client: openai.AsyncOpenAI, engine: FakeEngine) -> None:
    """Whole, and assembled by the client's own helper, which parses the arguments of strict tools."""
    tools: list[Any] = [WEATHER]
    whole = await client.chat.completions.create(model="test/model", messages=HI, tools=tools)
    strict: list[Any] = [openai.pydantic_function_tool(City, name="weather")]
    async with client.chat.completions.stream(model="test/model", messages=HI, tools=strict) as stream:
        streamed = await stream.get_final_completion()
    for answer in (whole, streamed):
        [choice] = answer.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "Look."
        [call] = choice.message.tool_calls or ()
        assert call.type == "function"
        assert call.function.name == "weather"
        assert json.loads(call.function.arguments) == {"city": "Paris"}
        assert answer.usage is None or answer.usage.completion_tokens_details is not None
    assert streamed.choices[0].message.tool_calls[0].function.parsed_arguments == City(city="Paris")
    reasoning = whole.choices[0].message.model_extra
    assert reasoning is not None
    assert reasoning["reasoning_content"] == "Hm"


async def test_responses(client: openai.AsyncOpenAI, engine: FakeEngine) -> None:
    whole = await client.responses.create(model="test/model", input="hi", tools=[TOOL])
    async with client.responses.stream(model="test/model", input="hi", tools=[TOOL]) as stream:
        names = [event.type async for event in stream]
        streamed = await stream.get_final_response()
    assert names[0] == "response.created"
    assert names[-1] == "response.completed"
    for answer in (whole, streamed):
        assert [item.type for item in answer.output] == ["reasoning", "message", "function_call"]
        assert answer.output_text == "Look."
        assert answer.output[2].type == "function_call"
        assert json.loads(answer.output[2].arguments) == {"city": "Paris"}
        assert answer.usage is not None
        assert answer.usage.output_tokens_details.reasoning_tokens == 1
    result: Any = {"type": "function_call_output", "call_id": whole.output[2].call_id, "output": "17"}  # type: ignore[union-attr]
    history: Any = [{"role": "user", "content": "hi"}, *whole.output, result]
    engine.pieces = ["Nice."]
    assert (await client.responses.create(model="test/model", input=history, tools=[TOOL])).output_text == "Nice."


async def test_parsed_responses(client: openai.AsyncOpenAI, engine: FakeEngine) -> None:
    engine.pieces = ['{"city": ', '"Rome"}']
    answer = await client.responses.parse(model="test/model", input="hi", text_format=City)
    assert answer.output_parsed == City(city="Rome")
    assert json.loads(engine.requests[0].constraint.json_schema)["properties"]["city"]["type"] == "string"


async def test_refusals(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.responses.create(model="test/model", input="hi", previous_response_id="resp_1")
    assert caught.value.param == "previous_response_id"
    with pytest.raises(openai.NotFoundError):
        await client.responses.create(model="nope", input="hi")
