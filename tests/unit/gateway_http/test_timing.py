"""Headers that say how soon an answer is wanted, and what is refused of them."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from services.common.limits import MAX_TARGET_MS
from services.gateway.http.errors import HttpError
from services.gateway.http.timing import Timing, read_timing
from tests.unit.gateway_http.fake_engine import FakeEngine

NAMES = ["x-envoy-expected-rq-timeout-ms", "x-slo-ttft-ms", "x-slo-tpot-ms", "x-llm-d-slo-ttft-ms"]


@pytest.mark.parametrize(
    ("headers", "timing"),
    [
        ({}, Timing(None, 0, 0)),
        ({"x-slo-ttft-ms": "250", "x-slo-tpot-ms": "30"}, Timing(None, 250, 30)),
        ({"x-llm-d-slo-ttft-ms": "250", "x-llm-d-slo-tpot-ms": "30"}, Timing(None, 250, 30)),
        ({"x-llm-d-slo-ttft-ms": "250", "x-slo-ttft-ms": "250.0"}, Timing(None, 250, 0)),
        ({"x-slo-ttft-ms": "0.2", "x-slo-tpot-ms": " 12.5 "}, Timing(None, 1, 13)),
        ({"x-slo-ttft-ms": "0"}, Timing(None, 0, 0)),
        ({"x-envoy-expected-rq-timeout-ms": "1500"}, Timing(101.5, 0, 0)),
        ({"x-envoy-expected-rq-timeout-ms": "0"}, Timing(None, 0, 0)),
    ],
)
def test_headers_are_read(headers: dict[str, str], timing: Timing) -> None:
    assert read_timing(headers, 100.0) == timing


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "value", ["", "-1", "+1", "1e3", "nan", "inf", "1,5", "0x10", "٣", str(MAX_TARGET_MS + 1), "9" * 99]
)
def test_bad_values_are_named(name: str, value: str) -> None:
    with pytest.raises(HttpError, match=name) as caught:
        read_timing({name: value}, 0.0)
    assert (caught.value.status, caught.value.param) == (400, name)


def test_two_names_must_agree() -> None:
    with pytest.raises(HttpError, match=r"x-slo-tpot-ms: differs from x-llm-d-slo-tpot-ms"):
        read_timing({"x-llm-d-slo-tpot-ms": "30", "x-slo-tpot-ms": "0"}, 0.0)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_the_engine_gets_them_with_every_prompt(client: httpx.AsyncClient, engine: FakeEngine, path: str) -> None:
    headers = {"x-slo-ttft-ms": "250", "x-slo-tpot-ms": "30", "x-envoy-expected-rq-timeout-ms": "60000"}
    text = path == "/v1/completions"
    body: dict[str, Any] = {"prompt": ["a", "b"]} if text else {"messages": [{"role": "user", "content": "a"}]}
    assert (await client.post(path, json=body | {"priority": 3}, headers=headers)).status_code == 200
    assert len(engine.requests) == (2 if text else 1)
    for request, deadline in zip(engine.requests, engine.deadlines, strict=True):
        assert (request.target_first_token_ms, request.target_token_gap_ms, request.priority) == (250, 30, 3)
        assert deadline is not None
        assert 0 < deadline <= 60


async def test_a_bad_header_is_answered_before_the_body_is_read(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    answer = await client.post("/v1/completions", content=b"not JSON", headers={"x-slo-ttft-ms": "soon"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "x-slo-ttft-ms")
    assert not engine.requests


async def test_the_description_names_headers_and_the_key(client: httpx.AsyncClient) -> None:
    document = (await client.get("/openapi.json")).json()
    named = {one["name"] for one in document["paths"]["/v1/completions"]["post"]["parameters"]}
    assert named >= set(NAMES)
    assert document["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
    priority = document["components"]["schemas"]["ChatRequest"]["properties"]["priority"]["description"]
    assert "Larger is more urgent" in priority
