"""Answers and streams of the application, without sockets."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from services.common.errors import QuireError, Reason
from tests.unit.gateway_http.fake_engine import MODEL, FakeEngine

HI = {"messages": [{"role": "user", "content": "hi"}]}


def events(response: httpx.Response) -> list[Any]:
    """The JSON of each event; the end marker as the string that it is."""
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = response.text.split("\n\n")
    assert lines.pop() == ""
    assert all(line.startswith("data: ") and "\n" not in line for line in lines)
    return [line[6:] if line == "data: [DONE]" else json.loads(line[6:]) for line in lines]


async def test_whole_text(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    response = await client.post("/v1/completions", json={"prompt": "hi"}, headers={"x-request-id": "r-1"})
    assert response.headers["x-request-id"] == "r-1"
    assert engine.requests[0].request_id == "r-1"
    assert response.json() == {
        "id": "cmpl-r-1",
        "object": "text_completion",
        "created": 1_700_000_001,
        "model": "test/model",
        "choices": [
            {"index": 0, "text": "Hello, world", "logprobs": None, "finish_reason": "length", "stop_reason": None}
        ],
        "usage": {
            "prompt_tokens": 2,
            "completion_tokens": 5,
            "total_tokens": 7,
            "prompt_tokens_details": {"cached_tokens": 3},
        },
    }


async def test_whole_chat(client: httpx.AsyncClient) -> None:
    body = (await client.post("/v1/chat/completions", json=HI | {"stop": ["wor"]})).json()
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello, ", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": "wor",
        }
    ]


async def test_several_prompts_are_numbered_prompt_by_prompt(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    """B2: every choice has its index and its own finish reason, and a prompt's tokens count once."""
    asked = {"prompt": ["a", "bb", "ccc"], "n": 2}
    body = (await client.post("/v1/completions", json=asked, headers={"x-request-id": "r"})).json()
    assert [one["index"] for one in body["choices"]] == list(range(6))
    assert [one["text"][0] for one in body["choices"]] == ["0", "1"] * 3
    assert {one["finish_reason"] for one in body["choices"]} == {"length"}
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (6, 36)
    assert sorted(one.request_id for one in engine.requests) == ["r-0", "r-1", "r-2"]

    streamed = events(await client.post("/v1/completions", json=asked | {"stream": True}))
    assert streamed.pop() == "[DONE]"
    texts = [""] * 6
    for chunk in streamed:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == [one["text"] for one in body["choices"]]


async def test_streamed_chat(client: httpx.AsyncClient) -> None:
    asked = HI | {"stream": True, "n": 2, "stream_options": {"include_usage": True}}
    *chunks, usage, done = events(await client.post("/v1/chat/completions", json=asked))
    assert done == "[DONE]"
    assert [chunk["choices"][0]["delta"] for chunk in chunks[:2]] == [{"role": "assistant", "content": ""}] * 2
    texts, reasons = ["", ""], [None, None]
    for chunk in chunks:
        assert chunk["usage"] is None
        assert (chunk["object"], chunk["model"]) == ("chat.completion.chunk", "test/model")
        [choice] = chunk["choices"]
        texts[choice["index"]] += choice["delta"].get("content", "")
        reasons[choice["index"]] = choice["finish_reason"] or reasons[choice["index"]]
    assert texts == ["0Hello, world", "1Hello, world"]
    assert reasons == ["length", "length"]
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 12
    assert len({chunk["id"] for chunk in [*chunks, usage]}) == 1


@pytest.mark.parametrize("count", [0, 1, 5])
async def test_logprobs_survive_minus_infinity(client: httpx.AsyncClient, engine: FakeEngine, count: int) -> None:
    """B8: exactly k alternatives in order besides the chosen token, and valid JSON, streamed or not."""
    engine.logprob = lambda rank: -0.5 if rank == 0 else float("-inf")
    chat = HI | {"logprobs": True, "top_logprobs": count}
    whole = (await client.post("/v1/chat/completions", json=chat)).json()["choices"][0]["logprobs"]["content"]
    streamed = [
        one
        for chunk in events(await client.post("/v1/chat/completions", json=chat | {"stream": True}))[1:-1]
        for one in chunk["choices"][0]["logprobs"]["content"]
    ]
    assert whole == streamed
    assert [one["token"] for one in whole] == ["Hel", "lo", ", ", "wor", "ld"]
    for one in whole:
        assert [other["logprob"] for other in one["top_logprobs"]] == [-0.5, -9999.0, -9999.0, -9999.0, -9999.0][:count]

    text = {"prompt": "hi", "logprobs": count}
    lists = (await client.post("/v1/completions", json=text)).json()["choices"][0]["logprobs"]
    assert [len(one) for one in lists["top_logprobs"]] == [count + 1] * 5
    assert lists["text_offset"] == [0, 3, 5, 7, 10]
    chunks = events(await client.post("/v1/completions", json=text | {"stream": True}))[:-1]
    assert [chunk["choices"][0]["logprobs"]["text_offset"][0] for chunk in chunks] == [0, 3, 5, 7, 10]


async def test_prompt_logprobs(client: httpx.AsyncClient) -> None:
    text = (await client.post("/v1/completions", json={"prompt": "hi", "prompt_logprobs": 0})).json()
    assert text["choices"][0]["prompt_logprobs"] == [
        None,
        {"105": {"logprob": -1.0, "rank": 1, "decoded_token": "i"}},
    ]
    assert (
        len((await client.post("/v1/chat/completions", json=HI | {"prompt_logprobs": 0})).json()["prompt_logprobs"])
        == 2
    )


@pytest.mark.parametrize("failure", [QuireError(Reason.EXECUTOR_LOST, "the executor is gone"), RuntimeError("boom")])
@pytest.mark.parametrize("fields", [{}, {"prompt": ["hi", "ho"]}])
async def test_a_failure_in_mid_stream_is_an_error_event(
    client: httpx.AsyncClient, engine: FakeEngine, failure: Exception, fields: dict[str, Any]
) -> None:
    """A7: what came before stands; then an error and no end marker."""
    engine.fail_after, engine.failure = 3, failure
    *chunks, error = events(await client.post("/v1/completions", json={"prompt": "hi", "stream": True} | fields))
    assert chunks
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
    assert error["error"]["type"] == "server_error"
    assert error["error"]["code"] == ("executor_lost" if isinstance(failure, QuireError) else "internal")
    assert "boom" not in error["error"]["message"]
    assert engine.running == 0


@pytest.mark.parametrize(
    ("failure", "status", "retry"),
    [
        (QuireError(Reason.EXECUTOR_LOST, "gone"), 503, "true"),
        (QuireError(Reason.QUEUE_FULL, "full"), 429, "true"),
        (QuireError(Reason.INTERNAL, "odd"), 500, "false"),
        (QuireError(Reason.NEVER_FITS, "huge"), 413, None),
        (RuntimeError("boom"), 500, "false"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_before_the_first_event_has_its_status(
    client: httpx.AsyncClient, engine: FakeEngine, failure: Exception, status: int, retry: str | None, stream: bool
) -> None:
    """The table's status, and whether repeating makes sense, in the form that OpenAI's clients read."""

    def fail(*_: object, **__: object) -> Any:
        raise failure

    engine.generate = fail  # type: ignore[method-assign]
    response = await client.post("/v1/chat/completions", json=HI | {"stream": stream}, headers={"x-request-id": "r"})
    assert response.status_code == status
    assert response.headers.get("x-should-retry") == retry
    assert response.headers["x-request-id"] == "r"
    assert "boom" not in response.text


@pytest.mark.parametrize("stream", [False, True])
async def test_an_end_without_a_finish_reason_is_an_error(
    client: httpx.AsyncClient, engine: FakeEngine, stream: bool
) -> None:
    """A7: a clean end happens only with a finish reason."""
    engine.silent_end = True
    response = await client.post("/v1/completions", json={"prompt": "hi", "stream": stream})
    if stream:
        assert events(response)[-1]["error"]["code"] == "internal"
    else:
        assert response.status_code == 500


async def test_a_default_budget_gives_way_to_the_context(client: httpx.AsyncClient) -> None:
    """C2: near the limit of 64, an absent max_tokens means what is left; a stated one is refused by name."""
    for length, left in ((62, 2), (63, 1)):
        body = (await client.post("/v1/completions", json={"prompt": "x" * length})).json()
        assert body["usage"]["completion_tokens"] == left
        assert body["choices"][0]["finish_reason"] == "length"
        streamed = events(await client.post("/v1/completions", json={"prompt": "x" * length, "stream": True}))
        assert streamed[-1] == "[DONE]"
        stated = await client.post("/v1/completions", json={"prompt": "x" * length, "max_tokens": 3})
        assert (stated.status_code, stated.json()["error"]["param"]) == (400, "max_tokens")
    for length in (64, 65):
        refused = await client.post("/v1/completions", json={"prompt": "x" * length})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")


async def test_harmless_extras_are_accepted(client: httpx.AsyncClient) -> None:
    """What OpenAI's clients send without wishing for another output, and what they send back as history."""
    extras = {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "parallel_tool_calls": True}
    neutral = {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "modalities": ["text"]}
    answer = {"role": "assistant", "content": "x", "refusal": None, "annotations": [], "tool_calls": None}
    messages = [*HI["messages"], answer | {"audio": None, "function_call": None}, *HI["messages"]]
    response = await client.post("/v1/chat/completions", json=extras | neutral | {"messages": messages})
    assert response.status_code == 200, response.text
    text = {"prompt": "hi", "best_of": 2, "n": 2, "echo": False, "suffix": None, "user": "u"}
    assert (await client.post("/v1/completions", json=text)).status_code == 200


async def test_models(client: httpx.AsyncClient) -> None:
    listed = (await client.get("/v1/models")).json()
    one = (await client.get(f"/v1/models/{MODEL.name}")).json()
    assert listed == {"object": "list", "data": [one]}
    assert one == {
        "id": "test/model",
        "object": "model",
        "created": 1_700_000_000,
        "owned_by": "quire",
        "max_model_len": 64,
    }
    for response in (
        await client.get("/v1/models/nope"),
        await client.post("/v1/completions", json={"model": "nope", "prompt": "hi"}),
    ):
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "model_not_found"
        assert response.json()["error"]["param"] == "model"


async def test_tokenize_and_back(client: httpx.AsyncClient) -> None:
    plain = (await client.post("/tokenize", json={"prompt": "é"})).json()
    assert plain == {"count": 3, "max_model_len": 64, "tokens": [257, 195, 169]}
    bare = (await client.post("/tokenize", json={"prompt": "é", "add_special_tokens": False})).json()
    assert bare["tokens"] == [195, 169]
    assert (await client.post("/tokenize", json=HI)).json()["count"] == 3
    assert (await client.post("/detokenize", json={"tokens": plain["tokens"]})).json() == {"prompt": "é"}
    for path, body, param in (
        ("/tokenize", {}, "prompt"),
        ("/tokenize", HI | {"prompt": "x"}, "prompt"),
        ("/tokenize", HI | {"add_special_tokens": True}, "add_special_tokens"),
        ("/detokenize", {"tokens": [300]}, "tokens"),
        ("/detokenize", {"tokens": [2**40]}, "tokens[0]"),
        ("/detokenize", {"tokens": "é"}, "tokens"),
    ):
        refused = await client.post(path, json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


async def test_health_follows_readiness(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    """K4: 503 until requests can be answered."""
    assert (await client.get("/health")).status_code == 200
    engine.ready = False
    assert (await client.get("/health")).status_code == 503


async def test_unknown_routes_have_the_same_shape(client: httpx.AsyncClient) -> None:
    missing = await client.get("/v1/nothing")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
    wrong = await client.get("/v1/completions")
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")
    assert wrong.headers["allow"] == "POST"
    assert "x-request-id" in wrong.headers


async def test_openapi_describes_the_bodies(client: httpx.AsyncClient) -> None:
    document = (await client.get("/openapi.json")).json()
    schema = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    name = schema["$ref"].rpartition("/")[2]
    described = document["components"]["schemas"][name]
    assert {"messages", "temperature", "max_completion_tokens"} <= set(described["properties"])
    assert described["additionalProperties"] is False
    references = {text.split('"')[0] for text in json.dumps(document).split('"$ref": "#/components/schemas/')[1:]}
    assert references <= set(document["components"]["schemas"])


async def test_openapi_shows_rules_of_outputs(client: httpx.AsyncClient) -> None:
    schemas = (await client.get("/openapi.json")).json()["components"]["schemas"]
    for body in ("ChatRequest", "CompletionRequest"):
        assert {"response_format", "structured_outputs", "guided_json"} <= schemas[body]["properties"].keys()
    assert "schema" in schemas["JsonSchemaFormat"]["properties"]
    assert {"json", "regex", "choice", "grammar"} <= schemas["StructuredOutputs"]["properties"].keys()
