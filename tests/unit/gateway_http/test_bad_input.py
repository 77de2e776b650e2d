"""Bad bodies are answered with 400 naming the field, and the engine never sees them."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.unit.gateway_http.fake_engine import FakeEngine

CHAT = '{"messages": [{"role": "user", "content": "hi"}], %s}'
TEXT = '{"prompt": "hi", %s}'


async def post(client: httpx.AsyncClient, body: str | bytes, path: str = "/v1/completions") -> httpx.Response:
    return await client.post(path, content=body, headers={"content-type": "application/json"})


async def check(client: httpx.AsyncClient, engine: FakeEngine, response: httpx.Response, param: str | None) -> None:
    """A 400 that names the field; afterwards a plain request is answered as ever."""
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    if param is not None:
        assert param in error["message"]
    assert len(response.content) < 1000
    assert not engine.requests
    after = await post(client, TEXT % '"max_tokens": 9')
    assert after.json()["choices"][0]["text"] == "Hello, world"


@pytest.mark.parametrize("template", [CHAT, TEXT], ids=["chat", "text"])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        # B4: numbers that are none, and absurd ones
        ('"temperature": NaN', "temperature"),
        ('"temperature": Infinity', "temperature"),
        ('"temperature": 1e999', "temperature"),
        ('"temperature": -0.1', "temperature"),
        ('"temperature": "1"', "temperature"),
        ('"temperature": true', "temperature"),
        ('"top_p": -1', "top_p"),
        ('"top_p": 1.5', "top_p"),
        ('"min_p": 2', "min_p"),
        ('"repetition_penalty": 0', "repetition_penalty"),
        ('"presence_penalty": 1e9', "presence_penalty"),
        ('"frequency_penalty": -1e9', "frequency_penalty"),
        ('"max_tokens": -1', "max_tokens"),
        ('"max_tokens": 0', "max_tokens"),
        ('"max_tokens": 1.5', "max_tokens"),
        ('"max_tokens": 9223372036854775808', "max_tokens"),
        ('"min_tokens": -1', "min_tokens"),
        ('"seed": 9223372036854775808', "seed"),
        ('"seed": 1.0', "seed"),
        # B5
        ('"top_k": -2', "top_k"),
        ('"top_k": 9223372036854775808', "top_k"),
        # B6: ids outside the vocabulary
        ('"logit_bias": {"-1": 1}', "logit_bias"),
        ('"logit_bias": {"300": 1}', "logit_bias"),
        ('"logit_bias": {"2147483648": 1}', "logit_bias.2147483648"),
        ('"logit_bias": {"9223372036854775808": 1}', "logit_bias.9223372036854775808"),
        ('"logit_bias": {"x": 1}', "logit_bias.x"),
        ('"logit_bias": {"5": NaN}', "logit_bias.5"),
        ('"logit_bias": {"5": 101}', "logit_bias[5]"),
        ('"logit_bias": [5]', "logit_bias"),
        ('"stop_token_ids": [-1]', "stop_token_ids"),
        ('"stop_token_ids": [300]', "stop_token_ids"),
        ('"stop_token_ids": [2147483648]', "stop_token_ids[0]"),
        # S5: bombs
        ('"n": 1000000', "n"),
        ('"n": 0', "n"),
        ('"n": -1', "n"),
        ('"stop": ""', "stop"),
        ('"stop": 5', "stop"),
        ('"stop": ["a", 5]', "stop[1]"),
        ('"stop": "\\ud800"', None),
        # What would change the output if it were ignored
        ('"chat_template": "{{ 1 }}"', "chat_template"),
        ('"temprature": 1', "temprature"),
        ('"stream_options": {"include_usage": true}', "stream_options"),
        ('"stream": "yes"', "stream"),
        ('"priority": 101', "priority"),
        ('"speculation": 17', "speculation"),
        ('"speculation": "on"', "speculation"),
        ('"speculation": true', "speculation"),
        ('"speculation": -1', "speculation"),
        ('"speculation": 4.0', "speculation"),
        ('"speculation": [4]', "speculation"),
        ('"speculation": ' + "9" * 4300, "speculation"),
        ('"speculation": "' + "9" * 10**5 + '"', "speculation"),
        ('"speculation": 4, "use_beam_search": true', "speculation"),
        ('"model": "' + "m" * 300 + '"', "model"),
    ],
)
async def test_shared_fields(
    client: httpx.AsyncClient, engine: FakeEngine, template: str, fields: str, param: str | None
) -> None:
    """B4, B5, B6, S5, S2: one table for both kinds of requests."""
    path = "/v1/chat/completions" if template is CHAT else "/v1/completions"
    await check(client, engine, await post(client, template % fields, path), param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ('"top_logprobs": 21, "logprobs": true', "top_logprobs"),
        ('"top_logprobs": -1, "logprobs": true', "top_logprobs"),
        ('"top_logprobs": 1000000000, "logprobs": true', "top_logprobs"),
        ('"top_logprobs": 1', "top_logprobs"),
        ('"logprobs": 1', "logprobs"),
        ('"chat_template_kwargs": {"a": 1}', "chat_template_kwargs.a"),
        ('"chat_template_kwargs": {"enable_thinking": "no"}', "chat_template_kwargs.enable_thinking"),
        ('"chat_template_kwargs": {"enable_thinking": true}', "chat_template_kwargs.enable_thinking"),
        ('"tools": [{"type": "function"}]', "tools[0].function"),
        ('"tools": [{"type": "function", "function": {"name": "f"}}]', "tools"),
        ('"tool_choice": "required"', "tool_choice"),
        ('"functions": [{}]', "functions"),
        ('"modalities": ["text", "audio"]', "modalities"),
        ('"reasoning_effort": "low"', "reasoning_effort"),
        ('"max_completion_tokens": -5', "max_completion_tokens"),
    ],
)
async def test_chat_fields(client: httpx.AsyncClient, engine: FakeEngine, fields: str, param: str) -> None:
    """B8, O: a field that asks for what is not there is refused, never ignored."""
    await check(client, engine, await post(client, CHAT % fields, "/v1/chat/completions"), param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ('"response_format": {"type": "xml"}', "response_format.type"),
        ('"response_format": {}', "response_format.type"),
        ('"response_format": {"type": "json_schema"}', "response_format.json_schema"),
        (
            '"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}',
            "response_format.json_schema.schema",
        ),
        ('"response_format": {"type": "json_object", "json_schema": {"schema": {}}}', "response_format.json_schema"),
        ('"response_format": {"type": "text", "triggers": []}', "response_format.triggers"),
        ('"response_format": {"type": "json_object", "strange": 1}', "response_format.strange"),
        ('"structured_outputs": {}', "structured_outputs"),
        ('"structured_outputs": {"regex": "a", "choice": ["b"]}', "structured_outputs.choice"),
        ('"structured_outputs": {"regex": 5}', "structured_outputs.regex"),
        ('"structured_outputs": {"schema": {}}', "structured_outputs.schema"),
        ('"structured_outputs": {"regex": "a", "whitespace_pattern": " "}', "structured_outputs.whitespace_pattern"),
        ('"structured_outputs": {"json": ' + '{"a":' * 90 + "1" + "}" * 91, "structured_outputs.json"),
        ('"guided_regex": "a", "response_format": {"type": "json_object"}', "guided_regex"),
        ('"guided_choice": "a"', "guided_choice"),
        ('"guided_whitespace_pattern": "a"', "guided_whitespace_pattern"),
    ],
)
@pytest.mark.parametrize("template", [CHAT, TEXT], ids=["chat", "text"])
async def test_rules_of_outputs(
    client: httpx.AsyncClient, engine: FakeEngine, template: str, fields: str, param: str
) -> None:
    """O1: what names no rule, or two of them."""
    path = "/v1/chat/completions" if template is CHAT else "/v1/completions"
    await check(client, engine, await post(client, template % fields, path), param)


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        (None, "messages"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "assistant", "tool_calls": []}], "messages[0].content"),
        ([{"content": "hi"}], "messages[0].role"),
        ([{"role": "", "content": "hi"}], "messages[0].role"),
        ([{"role": "user", "content": "hi", "odd": 1}], "messages[0].odd"),
        ([{"role": "user", "content": "hi"}, 5], "messages[1]"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/"}}]}], None),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}], "messages[0].tool_calls[0].function"),
        ([{"role": "user", "content": "x", "tool_call_id": "1"}], "messages[0].tool_call_id"),
        ([{"role": "tool", "content": "x"}], "messages[0].tool_call_id"),
        ([{"role": "user", "content": "x", "reasoning_content": "y"}], "messages[0].reasoning_content"),
        ([{"role": "tool", "content": "x", "tool_call_id": "1"}], "messages[0].tool_call_id"),
    ],
)
async def test_messages(client: httpx.AsyncClient, engine: FakeEngine, messages: Any, param: str | None) -> None:
    """C1 and S5: an empty chat, and parts that would make the server fetch something."""
    response = await post(client, json.dumps({"messages": messages}), "/v1/chat/completions")
    await check(client, engine, response, param or "messages[0].content[0]")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ('"prompt": ""', "prompt"),
        ('"prompt": [""]', "prompt"),
        ('"prompt": []', "prompt"),
        ('"prompt": [[]]', "prompt"),
        ('"prompt": null', "prompt"),
        ('"prompt": {"a": 1}', "prompt"),
        ('"prompt": ["a", 1]', "prompt[1]"),
        ('"prompt": [1, "a"]', "prompt[1]"),
        ('"prompt": [true]', "prompt[0]"),
        ('"prompt": [-1]', "prompt"),
        ('"prompt": [300]', "prompt"),
        ('"prompt": [2147483648]', "prompt[0]"),
        ('"prompt": [[5], [9223372036854775808]]', "prompt[1][0]"),
        ('"model": "m"', "prompt"),
        ('"prompt": "hi", "logprobs": 21', "logprobs"),
        ('"prompt": "hi", "logprobs": -1', "logprobs"),
        ('"prompt": "hi", "logprobs": true', "logprobs"),
        ('"prompt": "hi", "prompt_logprobs": 1000000000', "prompt_logprobs"),
        ('"prompt": "hi", "echo": true', "echo"),
        ('"prompt": "hi", "suffix": "x"', "suffix"),
        ('"prompt": "hi", "best_of": 2', "best_of"),
    ],
)
async def test_completion_fields(client: httpx.AsyncClient, engine: FakeEngine, fields: str, param: str) -> None:
    """C1, B6, B8."""
    await check(client, engine, await post(client, "{" + fields + "}"), param)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"null",
        b'"hi"',
        b'{"prompt": "hi"',
        b'{"prompt": "hi"} x',
        b'{"prompt": "\xff"}',
        b"\x00",
        b"[" * 100_000,
        b'{"prompt": "hi", "metadata": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"n": ' + b"9" * 100_000 + b"}",
    ],
)
async def test_malformed_bodies(client: httpx.AsyncClient, engine: FakeEngine, body: bytes) -> None:
    """S5: whatever is no JSON object of a sane depth is a 400."""
    response = await post(client, body)
    await check(client, engine, response, response.json()["error"]["param"])


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"stop": ["x"] * 10**5}, "stop"),
        ({"logit_bias": {str(one): 1 for one in range(10**6)}}, "logit_bias"),
        ({"logit_bias": {str(one): "x" for one in range(10**5)}}, "logit_bias.0"),
        ({"prompt": [5] * 10**6}, "prompt"),
        ({f"unknown{one}": 1 for one in range(10**5)}, "unknown0"),
        ({"u" * 10**6: 1}, "u" * 100),
    ],
    ids=["stops", "biases", "bad biases", "ids", "fields", "name"],
)
async def test_bombs(client: httpx.AsyncClient, engine: FakeEngine, body: dict[str, Any], param: str) -> None:
    """S5: large and bad costs no more than large, and the answer stays small."""
    await check(client, engine, await post(client, json.dumps({"prompt": "hi"} | body)), param)


async def test_many_values_are_refused_but_not_many_commas(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    """S5: the parser never builds millions of objects; text is one value whatever it holds."""
    bomb = TEXT % ('"metadata": [' + "[]," * (2 << 20) + "[]]")
    assert (await post(client, bomb)).status_code == 413
    text = ',[{\\"' * (1 << 20)
    refused = await post(client, '{"prompt": "' + text + '"}')
    assert refused.json()["error"]["message"].startswith("prompt: ")  # it got as far as the size of the prompt
    assert not engine.requests


async def test_too_large_a_body_is_refused_before_it_is_read(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    """L1: 413 with the limit named, whether the size was announced or not."""
    limit = 16 << 20

    async def unannounced() -> Any:
        for _ in range(18):
            yield b" " * (1 << 20)

    for content in (b" " * (limit + 1), unannounced()):
        response = await client.post("/v1/completions", content=content, headers={"content-type": "application/json"})
        assert response.status_code == 413
        assert str(limit) in response.json()["error"]["message"]


async def test_a_body_of_exactly_the_limit_is_read(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    """L1: one byte below the refusal is still answered."""
    body = TEXT % '"max_tokens": 2'
    assert (await post(client, body + " " * ((16 << 20) - len(body)))).status_code == 200


@pytest.mark.parametrize("kind", ["text/plain", "", "application/x-www-form-urlencoded", "application/jsonx"])
async def test_only_json_is_read(client: httpx.AsyncClient, kind: str) -> None:
    """A web page cannot have a browser post here without asking first."""
    response = await client.post("/v1/completions", content=TEXT % '"n": 1', headers={"content-type": kind})
    assert response.status_code == 415
    assert response.json()["error"]["param"] == "content-type"


@pytest.mark.parametrize("given", ["x" * 121, "é", "a\tb"])
async def test_odd_request_ids_are_refused(client: httpx.AsyncClient, given: str) -> None:
    response = await client.get("/v1/models", headers={"x-request-id": given.encode()})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "x-request-id"
    assert len(response.headers["x-request-id"]) == 32
