"""The official client works unmodified, and each failure raises the exception that its users expect."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from services.common.errors import QuireError, Reason
from services.gateway.http.server import HttpServer
from tests.unit.gateway_http.fake_engine import FakeEngine

HI: list[Any] = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def client(server: HttpServer) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"http://{server.address}/v1", api_key="none", max_retries=0) as client:
        yield client


async def test_models(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["test/model"]
    assert (await client.models.retrieve("test/model")).owned_by == "quire"


async def test_chat_with_everything(client: openai.AsyncOpenAI, engine: FakeEngine) -> None:
    answer = await client.chat.completions.create(
        model="test/model",
        messages=HI,
        n=2,
        logprobs=True,
        top_logprobs=2,
        stop=["wor"],
        seed=1,
        temperature=0,
        logit_bias={"5": -100},
        max_completion_tokens=9,
        user="me",
        extra_body={"top_k": 4, "min_tokens": 1},
    )
    assert [choice.message.content for choice in answer.choices] == ["0Hello, ", "1Hello, "]
    assert [choice.finish_reason for choice in answer.choices] == ["stop", "stop"]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 3
    assert answer.choices[1].logprobs is not None
    assert answer.choices[1].logprobs.content is not None
    assert [len(token.top_logprobs) for token in answer.choices[1].logprobs.content] == [2] * 5
    [request] = engine.requests
    assert (request.sampling.top_k, request.stop.min_tokens) == (4, 1)
    assert request.sampling.logit_bias == {5: -100}


async def test_streamed_chat(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="test/model", messages=HI, n=2, stream=True, stream_options={"include_usage": True}
    )
    texts, reasons, usage = ["", ""], ["", ""], None
    async for chunk in stream:
        usage = chunk.usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or ""
    assert texts == ["0Hello, world", "1Hello, world"]
    assert reasons == ["length", "length"]
    assert usage is not None
    assert usage.total_tokens == 14


async def test_the_client_s_stream_helper_assembles_the_answer(client: openai.AsyncOpenAI) -> None:
    async with client.chat.completions.stream(model="test/model", messages=HI, logprobs=True, stop=["ld"]) as stream:
        answer = await stream.get_final_completion()
    assert answer.choices[0].message.content == "Hello, wor"
    assert answer.choices[0].logprobs is not None
    assert [token.token for token in answer.choices[0].logprobs.content or []] == ["Hel", "lo", ", ", "wor", "ld"]


async def test_completions(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model="test/model", prompt=["a", "b"], logprobs=1, max_tokens=2)
    assert [(choice.index, choice.text, choice.finish_reason) for choice in answer.choices] == [
        (0, "Hello", "length"),
        (1, "Hello", "length"),
    ]
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.tokens == ["Hel", "lo"]
    stream = await client.completions.create(model="test/model", prompt=[1, 2], stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "Hello, world"


@pytest.mark.parametrize(
    ("fields", "exception"),
    [
        ({"temperature": -1}, openai.BadRequestError),
        ({"model": "nope"}, openai.NotFoundError),
        ({"extra_body": {"odd": 1}}, openai.BadRequestError),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, openai.BadRequestError),
    ],
)
async def test_refusals(client: openai.AsyncOpenAI, fields: dict[str, Any], exception: type[Exception]) -> None:
    """B4: named in the exception's own `param`."""
    with pytest.raises(exception) as caught:
        await client.chat.completions.create(**{"model": "test/model", "messages": HI} | fields)
    assert isinstance(caught.value, openai.APIStatusError)
    assert caught.value.param == next(iter(fields.get("extra_body", fields)))


async def test_too_large_a_body(client: openai.AsyncOpenAI) -> None:
    """L1: the client learns the limit although it was still sending."""
    with pytest.raises(openai.APIStatusError, match=str(16 << 20)) as caught:
        await client.completions.create(model="test/model", prompt="x" * (40 << 20))
    assert caught.value.status_code == 413


async def test_a_failure_in_mid_stream_raises(client: openai.AsyncOpenAI, engine: FakeEngine) -> None:
    """A7: after five tokens."""
    engine.pieces, engine.fail_after = ["x"] * 9, 5
    stream = await client.chat.completions.create(model="test/model", messages=HI, stream=True)
    text = ""

    async def read() -> None:
        nonlocal text
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""

    with pytest.raises(openai.APIError, match="the executor is gone") as caught:
        await read()
    assert text == "xxxxx"
    assert caught.value.code == "executor_lost"


@pytest.mark.parametrize(
    ("reason", "exception", "calls"),
    [
        (Reason.QUEUE_FULL, openai.RateLimitError, 2),
        (Reason.SCHEDULER_LOST, openai.InternalServerError, 2),
        (Reason.INTERNAL, openai.InternalServerError, 1),
    ],
)
async def test_the_client_repeats_what_may_succeed_later(
    server: HttpServer, engine: FakeEngine, reason: Reason, exception: type[Exception], calls: int
) -> None:
    seen = 0

    def fail(*_: object, **__: object) -> Any:
        nonlocal seen
        seen += 1
        raise QuireError(reason, "no")

    engine.generate = fail  # type: ignore[method-assign]
    async with openai.AsyncOpenAI(base_url=f"http://{server.address}/v1", api_key="none", max_retries=1) as client:
        with pytest.raises(exception):
            await client.chat.completions.create(model="test/model", messages=HI)
    assert seen == calls
