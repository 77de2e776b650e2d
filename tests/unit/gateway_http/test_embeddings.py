"""Embeddings over HTTP, without sockets. The engine's vectors are (tokens of the prompt, pooling)."""

from __future__ import annotations

import base64
import struct
from typing import Any

import httpx
import pytest

from services.common.errors import QuireError, Reason
from tests.unit.gateway_http.fake_engine import FakeEngine

PATH = "/v1/embeddings"


async def test_one_text(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.rates = {"x-ratelimit-limit-requests": "5"}
    response = await client.post(PATH, json={"input": "hello", "user": "me"}, headers={"x-request-id": "r-1"})
    assert response.json() == {
        "object": "list",
        "data": [{"object": "embedding", "index": 0, "embedding": [5.0, 1.0]}],
        "model": "test/model",
        "usage": {"prompt_tokens": 5, "total_tokens": 5},
    }
    assert response.headers["x-ratelimit-limit-requests"] == "5"
    assert engine.requests[0].request_id == "r-1"


@pytest.mark.parametrize(
    ("given", "lengths"),
    [
        (["a", "bcd"], [1, 3]),
        ([1, 2, 3, 4], [4]),
        ([[1], [2, 3]], [1, 2]),
        ([f"{'x' * (1 + number % 7)}" for number in range(100)], [1 + number % 7 for number in range(100)]),
    ],
    ids=["texts", "ids", "lists of ids", "more than at once"],
)
async def test_inputs_keep_their_order(
    client: httpx.AsyncClient, engine: FakeEngine, given: list[Any], lengths: list[int]
) -> None:
    body = (await client.post(PATH, json={"input": given, "pooling": "mean", "priority": 2})).json()
    assert [one["index"] for one in body["data"]] == list(range(len(lengths)))
    assert [one["embedding"] for one in body["data"]] == [[length, 2.0] for length in lengths]
    assert body["usage"]["total_tokens"] == sum(lengths)
    assert {one.priority for one in engine.requests} == {2}
    assert len({one.request_id for one in engine.requests}) == len(lengths)


async def test_base64_is_little_endian_float32(client: httpx.AsyncClient) -> None:
    body = (await client.post(PATH, json={"input": "abc", "encoding_format": "base64", "dimensions": 2})).json()
    assert struct.unpack("<2f", base64.b64decode(body["data"][0]["embedding"])) == (3.0, 1.0)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", 1]}, "input"),
        ({"input": [["a"]]}, "input"),
        ({"input": [[1], []]}, "input"),
        ({"input": [-1]}, "input"),
        ({"input": [300]}, "input"),
        ({"input": ["a"] * 1025}, "input"),
        ({"input": "a", "dimensions": 1}, "dimensions"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "pooling": "max"}, "pooling"),
        ({"input": "a", "model": 3}, "model"),
        ({"input": "a", "stream": True}, "stream"),
    ],
)
async def test_bad_fields_are_named(client: httpx.AsyncClient, fields: dict[str, Any], param: str) -> None:
    response = await client.post(PATH, json=fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert str(error["param"]).partition("[")[0] == param
    assert param in error["message"]


async def test_an_input_that_is_too_long(client: httpx.AsyncClient) -> None:
    response = await client.post(PATH, json={"input": [5] * 64})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "input")


async def test_an_unknown_model(client: httpx.AsyncClient) -> None:
    for more in ({}, {"dimensions": 2}):
        response = await client.post(PATH, json={"input": "a", "model": "other", **more})
        assert (response.status_code, response.json()["error"]["param"]) == (404, "model")


async def test_the_first_failure_ends_them_all(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.refusal = QuireError(Reason.RATE_LIMITED, "too many", retry_after=3)
    response = await client.post(PATH, json={"input": ["a"] * 40})
    assert (response.status_code, response.headers["retry-after"]) == (429, "3")
    assert engine.running == 0
