"""Anthropic's client works unmodified on /v1/messages."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import pytest

from services.gateway.http.server import HttpServer, serve_http
from services.gateway.identity import Identity
from services.gateway.keys.file import KeyFile
from tests.contract.gateway.keys import ACME, write_keys
from tests.unit.gateway_http.fake_engine import FakeEngine, Settings
from tests.unit.gateway_http.test_tools import CALL, CITY, FACTS

HI: list[Any] = [{"role": "user", "content": "hi"}]
TOOLS: list[Any] = [{"name": "weather", "input_schema": CITY}]


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(facts=FACTS, ends_itself=True, pieces=["<think>Hm</think>", "Look.", *CALL])


def client_of(server: HttpServer, key: str) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=f"http://{server.address}", api_key=key, max_retries=0)


@pytest.fixture
async def client(server: HttpServer) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with client_of(server, "none") as client:
        yield client


async def test_messages(client: anthropic.AsyncAnthropic, engine: FakeEngine) -> None:
    """Whole, and assembled by the client's own helper; then the conversation goes on."""
    asked: dict[str, Any] = {"model": "test/model", "max_tokens": 40, "messages": HI, "tools": TOOLS}
    asked["thinking"] = {"type": "enabled", "budget_tokens": 1024}
    whole = await client.messages.create(**asked)
    async with client.messages.stream(**asked) as stream:
        streamed = await stream.get_final_message()
    for answer in (whole, streamed):
        thinking, text, call = answer.content
        assert thinking.type == "thinking"
        assert thinking.thinking == "Hm"
        assert text.type == "text"
        assert text.text == "Look."
        assert call.type == "tool_use"
        assert (call.name, call.input) == ("weather", {"city": "Paris"})
        assert answer.stop_reason == "tool_use"
        assert answer.usage.output_tokens == 7
    result = {"type": "tool_result", "tool_use_id": whole.content[2].id, "content": "17"}  # type: ignore[union-attr]
    engine.pieces = ["Nice."]
    said: Any = {"role": "assistant", "content": whole.content}
    more = await client.messages.create(**asked | {"messages": [*HI, said, {"role": "user", "content": [result]}]})
    assert [block.type for block in more.content] == ["text"]
    assert more.stop_reason == "end_turn"


async def test_counting(client: anthropic.AsyncAnthropic) -> None:
    count = await client.messages.count_tokens(model="test/model", messages=HI, tools=TOOLS)
    assert count.input_tokens == 3


async def test_failures(client: anthropic.AsyncAnthropic, engine: FakeEngine) -> None:
    with pytest.raises(anthropic.NotFoundError):
        await client.messages.create(model="nope", max_tokens=9, messages=HI)
    with pytest.raises(anthropic.BadRequestError, match="temperature: "):
        await client.messages.create(model="test/model", max_tokens=9, messages=HI, extra_body={"temperature": -1})
    engine.fail_after = 2
    with pytest.raises(anthropic.APIStatusError, match="the executor is gone"):
        async with client.messages.stream(model="test/model", max_tokens=9, messages=HI) as stream:
            await stream.get_final_message()


async def test_its_key(tmp_path: Path, engine: FakeEngine) -> None:
    server = await serve_http(engine, Identity(KeyFile(write_keys(tmp_path))), Settings())
    async with client_of(server, "sk-wrong") as stranger:
        with pytest.raises(anthropic.AuthenticationError):
            await stranger.messages.create(model="test/model", max_tokens=9, messages=HI)
    async with client_of(server, ACME) as known:
        await known.messages.create(model="test/model", max_tokens=9, messages=HI)
    await server.stop()
    assert [caller.tenant for caller in engine.callers] == ["acme"]
