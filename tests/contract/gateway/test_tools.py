"""Tools and thinking through a whole gateway, a scheduler played by the test behind it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from quire.v1 import gateway_pb2
from services.gateway.http.app import create_app
from services.gateway.identity import Identity
from tests.contract.gateway.conftest import Stack, eventually, running
from tests.contract.gateway.fake_scheduler import LENGTH, STOP, FakeScheduler
from tests.fixtures.chat_templates import HERMES, LLAMA, PLAIN, REASONER, XML
from tests.fixtures.vocabularies import EOS_ID
from tests.unit.gateway_http.fake_engine import Settings

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = gateway_pb2.Tool(name="weather", description="Weather of a city", parameters=json.dumps(CITY))
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
REQUIRED = gateway_pb2.TOOL_MODE_REQUIRED
HI = gateway_pb2.ChatMessage(role="user", content="hi")


def asked(**fields: Any) -> gateway_pb2.GenerationInput:
    chat = {"messages": [HI], "tools": [WEATHER]} | fields
    return gateway_pb2.GenerationInput(chat=gateway_pb2.Chat(**chat))


async def stack_of(folder: Path, template: str, **settings: Any) -> AsyncIterator[Stack]:
    scheduler = FakeScheduler(f"unix:{folder}/scheduler.sock", context_length=2048, template=template)
    await scheduler.start()
    async with running(folder, scheduler, **settings) as made:
        await eventually(lambda: made.engine.ready)
        yield made
    await scheduler.stop()


@pytest.fixture
async def hermes(tmp_path: Path) -> AsyncIterator[Stack]:
    async for stack in stack_of(tmp_path, HERMES):
        yield stack


def prompt_of(submit: Any) -> str:
    return bytes(token for token in submit.prompt_token_ids if token < 256).decode()


async def test_a_call_with_its_thinking(hermes: Stack) -> None:
    call = hermes.inference.GenerateStream(gateway_pb2.GenerateStreamRequest(input=asked()))
    submit = await hermes.scheduler.heard(hermes.scheduler.submits)
    assert '"description": "Weather of a city"' in prompt_of(submit)
    assert not submit.HasField("constraint")
    await hermes.scheduler.started(submit)
    output = [*f"<think>Hm</think>Look.\n{CALL}".encode(), EOS_ID]
    for at in range(0, len(output), 5):
        piece = output[at : at + 5]
        await hermes.scheduler.tokens(submit, piece, at, end=STOP if at + 5 >= len(output) else None)
    messages = [message async for message in call]
    assert "".join(message.reasoning for message in messages) == "Hm"
    assert "".join(message.text for message in messages) == "Look."
    parts = [part for message in messages for part in message.tool_calls]
    assert (parts[0].index, parts[0].name) == (0, "weather")
    assert parts[0].id.startswith("call_")
    assert json.loads("".join(part.arguments for part in parts)) == {"city": "Paris"}
    assert not any(part.fault for part in parts)
    assert messages[-1].usage.reasoning_tokens == len("<think>Hm</think>")
    assert messages[-1].usage.completion_tokens == len(output)


async def test_a_whole_answer(hermes: Stack) -> None:
    call = hermes.inference.Generate(gateway_pb2.GenerateRequest(input=asked()))
    submit = await hermes.scheduler.heard(hermes.scheduler.submits)
    await hermes.scheduler.started(submit)
    broken = '<tool_call>{"name": "weather", "arguments": {x'
    await hermes.scheduler.tokens(submit, [*f"{CALL}{broken}".encode(), EOS_ID], end=STOP)
    [choice] = (await call).choices
    assert [(one.name, json.loads(one.arguments)) for one in choice.tool_calls] == [("weather", {"city": "Paris"})]
    assert choice.text == broken


async def test_plain_chats_are_text_as_ever(hermes: Stack) -> None:
    """Over gRPC thinking is told apart on request."""
    for split, text, reasoning in ((False, "<think>Hm</think>Yes", ""), (True, "Yes", "Hm")):
        hermes.scheduler.submits.clear()
        call = hermes.inference.Generate(
            gateway_pb2.GenerateRequest(input=asked(tools=[], split_reasoning=split, thinking=True))
        )
        submit = await hermes.scheduler.heard(hermes.scheduler.submits)
        await hermes.scheduler.started(submit)
        await hermes.scheduler.tokens(submit, [*b"<think>Hm</think>Yes", EOS_ID], end=STOP)
        [choice] = (await call).choices
        assert (choice.text, choice.reasoning) == (text, reasoning)


async def test_forced_calls_travel_as_a_rule(hermes: Stack) -> None:
    call = hermes.inference.Generate(gateway_pb2.GenerateRequest(input=asked(tool_mode=REQUIRED, tool_name="weather")))
    submit = await hermes.scheduler.heard(hermes.scheduler.submits)
    assert "weather" in submit.constraint.grammar
    await hermes.scheduler.started(submit)
    await hermes.scheduler.tokens(submit, CALL.encode()[:30], end=LENGTH)
    [choice] = (await call).choices
    assert (choice.text, len(choice.tool_calls)) == (CALL[:30], 0)


async def test_results_go_back_through_the_template(hermes: Stack) -> None:
    said = gateway_pb2.ToolCall(id="1", name="weather", arguments='{"city":"Paris"}')
    messages = [
        HI,
        gateway_pb2.ChatMessage(role="assistant", tool_calls=[said], reasoning_content="Hm"),
        gateway_pb2.ChatMessage(role="tool", tool_call_id="1", content="17 degrees"),
    ]
    call = hermes.inference.Generate(gateway_pb2.GenerateRequest(input=asked(messages=messages, thinking=False)))
    submit = await hermes.scheduler.heard(hermes.scheduler.submits)
    prompt = prompt_of(submit)
    assert '<think>Hm</think><tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>' in prompt
    assert "tool\n17 degrees" in prompt
    assert prompt.endswith("assistant\n<think>\n\n</think>\n\n")
    call.cancel()


@pytest.mark.parametrize(
    ("fields", "code", "field"),
    [
        ({"tools": [gateway_pb2.Tool(name="a b")]}, "INVALID_ARGUMENT", "chat.tools[0].name"),
        ({"tools": [WEATHER, WEATHER]}, "INVALID_ARGUMENT", "chat.tools[1].name"),
        ({"tools": [gateway_pb2.Tool(name="f", parameters="{")]}, "INVALID_ARGUMENT", "chat.tools[0].parameters"),
        ({"tool_name": "weather"}, "INVALID_ARGUMENT", "chat.tool_name"),
        ({"tool_mode": REQUIRED, "tool_name": "x"}, "INVALID_ARGUMENT", "chat.tool_name"),
        ({"tool_mode": REQUIRED, "tools": []}, "INVALID_ARGUMENT", "chat.tool_mode"),
        ({"tool_mode": 9}, "INVALID_ARGUMENT", "chat.tool_mode"),
        (
            {"tools": [gateway_pb2.Tool(name="f", parameters='{"not": {}}', strict=True)]},
            "INVALID_ARGUMENT",
            "chat.tools[0].parameters",
        ),
        (
            {
                "tool_mode": REQUIRED,
                "tools": [
                    gateway_pb2.Tool(name=f"f{i}", parameters=json.dumps({"description": "x" * 40_000}))
                    for i in range(2)
                ],
            },
            "INVALID_ARGUMENT",
            "chat.tools",
        ),
    ],
)
async def test_bad_tools(hermes: Stack, fields: dict[str, Any], code: str, field: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await hermes.inference.Generate(gateway_pb2.GenerateRequest(input=asked(**fields)))
    assert caught.value.code().name == code
    assert (caught.value.details() or "").startswith(f"{field}: ")
    assert not hermes.scheduler.submits
    assert len(hermes.engine._table) == 0


async def test_a_schema_that_nobody_enforces_is_not_compiled(hermes: Stack) -> None:
    odd = gateway_pb2.Tool(name="f", parameters='{"not": {}}')
    call = hermes.inference.Generate(gateway_pb2.GenerateRequest(input=asked(tools=[odd])))
    submit = await hermes.scheduler.heard(hermes.scheduler.submits)
    assert not submit.HasField("constraint")
    call.cancel()


@pytest.mark.parametrize(("template", "style"), [(PLAIN, "auto"), (PLAIN, "llama"), (XML, "auto")])
async def test_models_that_take_no_tools(tmp_path: Path, template: str, style: str) -> None:
    """UNIMPLEMENTED naming the field, over HTTP a 400."""
    async for stack in stack_of(tmp_path, template, tool_style=style):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stack.inference.Generate(gateway_pb2.GenerateRequest(input=asked()))
        assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
        assert (caught.value.details() or "").startswith("chat.tools: ")
        transport = httpx.ASGITransport(create_app(stack.engine, Identity(None), Settings()))
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            tool = {"type": "function", "function": {"name": "f"}}
            body = {"messages": [{"role": "user", "content": "hi"}], "tools": [tool]}
            refused = await client.post("/v1/chat/completions", json=body)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools")
        assert not stack.scheduler.submits


async def test_over_http(hermes: Stack) -> None:
    """A schema that cannot be followed is told by the client's own name of it; a call arrives as OpenAI writes it."""
    transport = httpx.ASGITransport(create_app(hermes.engine, Identity(None), Settings()))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        tool = {"type": "function", "function": {"name": "f", "strict": True, "parameters": {"not": {}}}}
        body = {"messages": [{"role": "user", "content": "hi"}], "tools": [tool]}
        refused = await client.post("/v1/chat/completions", json=body)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "tools[0].function.parameters"
        assert not hermes.scheduler.submits


@pytest.mark.parametrize(
    ("template", "style", "text"),
    [
        (LLAMA, "auto", '{"name": "weather", "parameters": {"city": "Paris"}}'),
        (LLAMA, "hermes", CALL),
        (XML, "hermes", CALL),
    ],
)
async def test_styles(tmp_path: Path, template: str, style: str, text: str) -> None:
    async for stack in stack_of(tmp_path, template, tool_style=style):
        call = stack.inference.Generate(gateway_pb2.GenerateRequest(input=asked()))
        submit = await stack.scheduler.heard(stack.scheduler.submits)
        await stack.scheduler.started(submit)
        await stack.scheduler.tokens(submit, [*text.encode(), EOS_ID], end=STOP)
        [choice] = (await call).choices
        assert [one.name for one in choice.tool_calls] == ["weather"]


async def test_a_rule_of_a_model_whose_prompt_begins_to_think(tmp_path: Path) -> None:
    async for stack in stack_of(tmp_path, REASONER):
        request = asked(tools=[], split_reasoning=True)
        request.constraint.json_schema = json.dumps(CITY)
        call = stack.inference.Generate(gateway_pb2.GenerateRequest(input=request))
        submit = await stack.scheduler.heard(stack.scheduler.submits)
        assert "thinking" in submit.constraint.grammar
        await stack.scheduler.started(submit)
        await stack.scheduler.tokens(submit, [*b'Hm</think>{"city": "Paris"}', EOS_ID], end=STOP)
        [choice] = (await call).choices
        assert (choice.reasoning, choice.text) == ("Hm", '{"city": "Paris"}')
