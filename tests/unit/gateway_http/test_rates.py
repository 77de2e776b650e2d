"""What HTTP answers tell of a caller's rates, and of a limit that is reached."""

from __future__ import annotations

import httpx
import pytest

from services.common.errors import QuireError, Reason
from tests.unit.gateway_http.fake_engine import FakeEngine

LEFT = {"x-ratelimit-limit-requests": "60", "x-ratelimit-remaining-requests": "59"}
NONE_LEFT = LEFT | {"x-ratelimit-remaining-requests": "0"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_answers_tell_what_is_left(
    client: httpx.AsyncClient, engine: FakeEngine, path: str, stream: bool
) -> None:
    engine.rates = LEFT
    prompt = {"prompt": "a"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}]}
    answer = await client.post(path, json=prompt | {"stream": stream})
    assert answer.status_code == 200
    assert {name: answer.headers.get(name) for name in LEFT} == LEFT


@pytest.mark.parametrize("stream", [False, True])
async def test_a_limit_that_is_reached_says_when_to_come_back(
    client: httpx.AsyncClient, engine: FakeEngine, stream: bool
) -> None:
    engine.refusal = QuireError(Reason.RATE_LIMITED, "requests_per_minute: no", retry_after=2.3, headers=NONE_LEFT)
    answer = await client.post("/v1/completions", json={"prompt": "a", "stream": stream})
    assert answer.status_code == 429
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    said = {name: answer.headers[name] for name in ("retry-after", "retry-after-ms", "x-should-retry")}
    assert said == {"retry-after": "3", "retry-after-ms": "2300", "x-should-retry": "true"}
    assert {name: answer.headers.get(name) for name in LEFT} == NONE_LEFT


async def test_a_request_that_can_never_come_in_is_not_worth_repeating(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.refusal = QuireError(Reason.TOO_LARGE, "tokens_per_minute: 9 are too many")
    answer = await client.post("/v1/completions", json={"prompt": "a"})
    assert answer.status_code == 413
    assert "retry-after" not in answer.headers
