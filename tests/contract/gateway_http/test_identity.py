"""Who may call what over HTTP: OpenAI's client meets the exceptions that its users expect."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from services.gateway.caller import Scope
from services.gateway.http.access import needed
from services.gateway.http.app import create_app
from services.gateway.http.server import HttpServer, serve_http
from services.gateway.identity import Identity
from services.gateway.keys.file import KeyFile
from tests.contract.gateway.keys import ACME, BLUE, METRICS, WRONG, write_keys
from tests.unit.gateway_http.fake_engine import FakeEngine, Settings

HI: list[Any] = [{"role": "user", "content": "hi"}]
OPEN = {"/health"}
DOCUMENT: dict[str, Any] = create_app(FakeEngine(), Identity(None), Settings()).openapi()
CALLS = [
    (method.upper(), re.sub(r"{\w+(:path)?}", "test/model", path))
    for path, operations in DOCUMENT["paths"].items()
    for method in operations
    if path not in OPEN
]
UNKNOWN = [("GET", "/openapi.json"), ("GET", "/nothing/here"), ("DELETE", "/health/x")]


@pytest.fixture
async def locked(tmp_path: Path, engine: FakeEngine) -> AsyncIterator[HttpServer]:
    """A server with keys."""
    server = await serve_http(engine, Identity(KeyFile(write_keys(tmp_path))), Settings())
    yield server
    await server.stop()


def client_of(server: HttpServer, key: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"http://{server.address}/v1", api_key=key, max_retries=0)


def test_the_description_says_what_is_open() -> None:
    assert len(CALLS) >= 7
    assert DOCUMENT["security"] == [{"key": []}, {"x-api-key": []}]
    assert DOCUMENT["components"]["securitySchemes"].keys() == {"key", "x-api-key"}
    for path, operations in DOCUMENT["paths"].items():
        assert all(("security" in one) == (path in OPEN) for one in operations.values()), path


@pytest.mark.parametrize(("method", "path"), [*CALLS, *UNKNOWN])
async def test_every_path_needs_a_known_key(locked: HttpServer, engine: FakeEngine, method: str, path: str) -> None:
    """S3: 401 in OpenAI's shape whatever is sent instead, before the body is looked at."""
    sendable = [value for value in WRONG if value is None or value == value.strip()]
    wrong: list[str | bytes | None] = [*sendable, b"Bearer \xff\xfe", "Bearer ключ".encode()]
    async with httpx.AsyncClient(base_url=f"http://{locked.address}") as client:
        for value in wrong:
            headers = {"content-type": "application/json"}
            sent = httpx.Headers(headers if value is None else [*headers.items(), ("authorization", value)])  # type: ignore[list-item]
            answer = await client.request(method, path, headers=sent, content=b"no JSON")
            assert answer.status_code == 401, (value, answer.text)
            error = answer.json()["error"]
            assert error["type"] == "authentication_error"
            assert error.get("code", "invalid_api_key") == "invalid_api_key"
            assert answer.headers["www-authenticate"] == "Bearer"
            assert answer.headers["x-request-id"]
            assert ACME not in answer.text
        both = [("authorization", f"Bearer {ACME}"), ("authorization", f"Bearer {BLUE}")]
        assert (await client.request(method, path, headers=both)).status_code == 401
        known = await client.request(method, path, headers={"authorization": f"bearer  {ACME}"}, content=b"no JSON")
        assert known.status_code != 401
        of_scope = {METRICS: path == "/metrics", ACME: path != "/metrics"}
        for key, opens in of_scope.items():
            answer = await client.request(method, path, headers={"authorization": f"Bearer {key}"}, content=b"no JSON")
            refused = answer.status_code == 403
            assert refused is ((method, path) in CALLS and not opens), (key, answer.text)
            if refused:
                error = answer.json()["error"]
                assert error.get("code", error["type"]) in ("permission_denied", "permission_error")
    assert not engine.requests


async def test_a_key_may_come_by_itself(locked: HttpServer, engine: FakeEngine) -> None:
    """As Anthropic's clients send it; the same key twice is one key, two keys are none."""
    accepted: list[list[tuple[str, str]]] = [
        [("x-api-key", ACME)],
        [("x-api-key", ACME), ("authorization", f"Bearer {ACME}")],
    ]
    refused: list[list[tuple[str, str]]] = [
        [("x-api-key", "")],
        [("x-api-key", "sk-wrong")],
        [("x-api-key", f"Bearer {ACME}")],
        [("x-api-key", ACME), ("x-api-key", BLUE)],
        [("x-api-key", ACME), ("authorization", f"Bearer {BLUE}")],
        [("x-api-key", ACME), ("authorization", "Basic abc")],
    ]
    async with httpx.AsyncClient(base_url=f"http://{locked.address}") as client:
        for headers in accepted:
            assert (await client.get("/v1/models", headers=headers)).status_code == 200, headers
        for headers in refused:
            assert (await client.get("/v1/models", headers=headers)).status_code == 401, headers


async def test_health_stays_open(locked: HttpServer) -> None:
    async with httpx.AsyncClient(base_url=f"http://{locked.address}") as client:
        assert (await client.get("/health")).status_code == 200


async def test_prometheus_shows_a_key(locked: HttpServer) -> None:
    async with httpx.AsyncClient(base_url=f"http://{locked.address}") as client:
        answer = await client.get("/metrics", headers={"authorization": f"Bearer {METRICS}"})
    assert (answer.status_code, answer.text) == (200, "quire_up 1\n")
    assert answer.headers["content-type"].startswith("text/plain")


def test_a_route_that_nobody_thought_of_needs_an_operator() -> None:
    assert needed("/new") is Scope.ADMIN
    assert needed("/v1/new") is Scope.INFER


async def test_openai_s_client_with_and_without_a_key(locked: HttpServer, engine: FakeEngine) -> None:
    async with client_of(locked, "sk-wrong") as stranger:
        with pytest.raises(openai.AuthenticationError) as caught:
            await stranger.chat.completions.create(model="test/model", messages=HI)
        assert caught.value.code == "invalid_api_key"
        with pytest.raises(openai.AuthenticationError):
            await stranger.models.list()
    async with client_of(locked, ACME) as client:
        assert [model.id async for model in client.models.list()] == ["test/model"]
        answer = await client.chat.completions.create(model="test/model", messages=HI, extra_body={"priority": 7})
        assert answer.choices[0].message.content == "Hello, world"
    assert [(one.tenant, one.weight) for one in engine.callers] == [("acme", 2.5)]


async def test_a_priority_above_the_tenant_s_is_refused(locked: HttpServer, engine: FakeEngine) -> None:
    async with client_of(locked, BLUE) as client:
        with pytest.raises(openai.PermissionDeniedError) as caught:
            await client.chat.completions.create(model="test/model", messages=HI, extra_body={"priority": 1})
    assert (caught.value.param, caught.value.code) == ("priority", "permission_denied")
    assert not engine.requests


async def test_a_tenant_is_the_key_s_whatever_else_is_sent(locked: HttpServer, engine: FakeEngine) -> None:
    """Kind 14: neither the body nor any other header names a tenant."""
    headers = dict.fromkeys(("x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id", "tenant"), "acme")
    async with client_of(locked, BLUE) as client:
        await client.chat.completions.create(
            model="test/model",
            messages=HI,
            user="acme",
            prompt_cache_key="acme",
            safety_identifier="acme",
            extra_headers=headers,
        )
    assert [caller.tenant for caller in engine.callers] == ["blue"]


async def test_without_keys_any_key_will_do(server: HttpServer, engine: FakeEngine) -> None:
    async with client_of(server, "none") as client:
        await client.chat.completions.create(model="test/model", messages=HI, extra_body={"priority": 100})
    assert [caller.tenant for caller in engine.callers] == ["default"]
