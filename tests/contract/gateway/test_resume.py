"""Clients that lose their connection and come back for the rest, and requests that are sent twice."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from quire.v1 import gateway_pb2, types_pb2
from services.common.errors import Reason
from services.gateway.http.app import create_app
from services.gateway.identity import Identity
from tests.contract.gateway.conftest import Stack, eventually, running
from tests.contract.gateway.fake_scheduler import LENGTH, STOP, FakeScheduler
from tests.contract.gateway.test_generate import asked, reason_of
from tests.fixtures.vocabularies import EOS_ID

WINDOW = 1.0


@pytest.fixture
async def keeping(tmp_path: Path, scheduler: FakeScheduler) -> AsyncIterator[Stack]:
    async with running(tmp_path, scheduler, resume_window=WINDOW) as made:
        await eventually(lambda: made.engine.ready)
        yield made


def again(request: gateway_pb2.GenerateStreamRequest, event_id: str) -> gateway_pb2.GenerateStreamRequest:
    resumed = gateway_pb2.GenerateStreamRequest()
    resumed.CopyFrom(request)
    resumed.last_event_id = event_id
    return resumed


def joined(messages: list[gateway_pb2.GenerateStreamResponse], choice: int = 0) -> tuple[str, list[int]]:
    mine = [message for message in messages if message.choice == choice]
    return "".join(message.text for message in mine), [token for message in mine for token in message.token_ids]


async def rest_of(call: Any) -> list[gateway_pb2.GenerateStreamResponse]:
    """What follows where `read` was used before."""
    found = []
    while (message := await call.read()) is not grpc.aio.EOF:
        found.append(message)
    return found


async def lose(call: Any, stack: Stack) -> None:
    """The client goes, and the gateway has noticed."""
    call.cancel()
    await eventually(lambda: all(not stream.is_read for stream in stack.engine._entrance.streams))


async def test_a_stream_goes_on_behind_its_last_event(keeping: Stack) -> None:
    """Complete, no token twice, n = 2; what was generated meanwhile is there at once."""
    scheduler, request = keeping.scheduler, asked(choice_count=2, stop={"stop": ["END"], "max_tokens": 50})
    call = keeping.inference.GenerateStream(request)
    submit = await scheduler.heard(scheduler.submits)
    assert submit.keep_ms == 1000 * WINDOW
    await scheduler.started(submit, cached=1)
    await scheduler.tokens(submit, b"Hello E")
    await scheduler.tokens(submit, [*b"one", EOS_ID], choice=1, end=STOP)
    got = [await call.read(), await call.read()]
    await lose(call, keeping)
    await scheduler.tokens(submit, b"ND of it", position=7)  # the stop string is found though nobody reads
    stop = await scheduler.heard(scheduler.stops)
    assert (stop.choice, stop.output_length) == (0, 9)
    await eventually(lambda: len(keeping.engine._table) == 0)
    rest = [message async for message in keeping.inference.GenerateStream(again(request, got[-1].event_id))]
    assert joined([*got, *rest]) == ("Hello ", list(b"Hello END"))
    assert joined([*got, *rest], 1) == ("one", [*b"one", EOS_ID])
    assert rest[-1].usage == types_pb2.Usage(prompt_tokens=3, completion_tokens=13, cached_tokens=1)
    (end,) = (message for message in rest if message.finish_reason)  # the other one was seen
    assert (end.choice, end.matched_stop, end.finish_reason) == (0, "END", STOP)
    for first in got:  # from earlier, too
        more = [message async for message in keeping.inference.GenerateStream(again(request, first.event_id))]
        assert joined([*got[: got.index(first) + 1], *more]) == ("Hello ", list(b"Hello END"))
    assert len(scheduler.submits) == 1
    assert scheduler.cancels == []
    finished = {"model_name": "m", "engine": "0", "finished_reason": "stop"}
    assert keeping.registry.get_sample_value("vllm:request_success_total", finished) == 1  # N1: once


async def test_a_running_stream_is_gone_on_with(keeping: Stack) -> None:
    scheduler, request = keeping.scheduler, asked(request_id="mine")
    call = keeping.inference.GenerateStream(request)
    submit = await scheduler.heard(scheduler.submits)
    await scheduler.started(submit)
    await scheduler.tokens(submit, "ab\u00e4".encode()[:3])  # half a character is held back
    first = await call.read()
    assert (first.text, first.event_id) == ("ab", "mine:3")
    await lose(call, keeping)
    resumed = keeping.inference.GenerateStream(again(request, first.event_id))
    await scheduler.tokens(submit, "\u00e4c".encode()[1:], position=3, end=LENGTH)
    assert joined([message async for message in resumed]) == ("\u00e4c", list("\u00e4c".encode()[1:]))
    assert scheduler.cancels == []


async def test_nobody_comes_back(keeping: Stack) -> None:
    """The request ends once the window is over, and not before; what comes later is told so."""
    scheduler, request = keeping.scheduler, asked(request_id="mine")
    call = keeping.inference.GenerateStream(request)
    submit = await scheduler.heard(scheduler.submits)
    await scheduler.started(submit)
    await scheduler.tokens(submit, b"a")
    event_id = (await call.read()).event_id
    begun = asyncio.get_running_loop().time()
    call.cancel()
    assert await scheduler.heard(scheduler.cancels) == submit.handle
    assert asyncio.get_running_loop().time() - begun > 0.9 * WINDOW
    assert len(keeping.engine._table) == 0
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await keeping.inference.GenerateStream(again(request, event_id)).read()
    assert (caught.value.code(), reason_of(caught.value)) == (grpc.StatusCode.NOT_FOUND, "NOT_FOUND")


async def test_whoever_wants_no_more_says_so(keeping: Stack) -> None:
    call = keeping.inference.GenerateStream(asked(request_id="mine"))
    submit = await keeping.scheduler.heard(keeping.scheduler.submits)
    await keeping.scheduler.started(submit)
    await keeping.scheduler.tokens(submit, b"a")
    await call.read()
    await keeping.inference.Cancel(gateway_pb2.CancelRequest(request_id="mine"))
    assert await keeping.scheduler.heard(keeping.scheduler.cancels) == submit.handle
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() == grpc.StatusCode.CANCELLED
    for request_id in ("mine", "nobody"):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await keeping.inference.Cancel(gateway_pb2.CancelRequest(request_id=request_id))
        assert reason_of(caught.value) == "NOT_FOUND"
    transport = httpx.ASGITransport(create_app(keeping.engine, Identity(None), keeping.engine.settings))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway", timeout=20) as http:
        headers = {"x-request-id": "a/b c"}
        running = asyncio.create_task(http.post("/v1/completions", json={"prompt": "hi"}, headers=headers))
        submit = await keeping.scheduler.heard(keeping.scheduler.submits, 2)
        assert (await http.delete("/v1/streams/a/b%20c")).status_code == 204
        assert (await running).status_code == 499
        assert (await http.delete("/v1/streams/a/b%20c")).json()["error"]["code"] == "not_found"
        assert await keeping.scheduler.heard(keeping.scheduler.cancels, 2) == submit.handle


@pytest.mark.parametrize(
    ("event_id", "fields", "reason"),
    [
        ("mine:1,2", {"request_id": "mine"}, "INVALID_FIELD"),
        ("mine", {}, "INVALID_FIELD"),
        ("other:1", {"request_id": "mine"}, "INVALID_FIELD"),
        ("nobody:1", {}, "NOT_FOUND"),
        ("mine:1", {"choice_count": -1}, "INVALID_FIELD"),
        ("mine:1", {"priority": 7}, "ALREADY_EXISTS"),  # other contents
    ],
)
async def test_wrong_places_are_refused_by_name(keeping: Stack, event_id: str, fields: Any, reason: str) -> None:
    call = keeping.inference.GenerateStream(asked(request_id="mine"))
    await keeping.scheduler.heard(keeping.scheduler.submits)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await keeping.inference.GenerateStream(again(asked(**fields), event_id)).read()
    assert reason_of(caught.value) == reason
    call.cancel()


async def test_a_repeated_request_joins_the_one_that_runs(keeping: Stack) -> None:
    """Both see all of it, streamed or whole; it is computed once, and counts once. A later one gets it as it was."""
    scheduler, request = keeping.scheduler, asked(request_id="same")
    first = keeping.inference.GenerateStream(request)
    submit = await scheduler.heard(scheduler.submits)
    await scheduler.started(submit)
    await scheduler.tokens(submit, b"Hel")
    got = [await first.read()]
    second = asyncio.ensure_future(keeping.inference.Generate(gateway_pb2.GenerateRequest(input=request.input)))
    (stream,) = keeping.engine._entrance.streams
    await eventually(lambda: len(stream.request.readers) == 2)
    await scheduler.tokens(submit, [*b"lo", EOS_ID], position=3, end=STOP)
    got += await rest_of(first)
    assert joined(got) == ("Hello", [*b"Hello", EOS_ID])
    for answer in (
        await second,
        await keeping.inference.Generate(gateway_pb2.GenerateRequest(input=request.input)),
    ):
        assert (answer.choices[0].text, answer.usage.completion_tokens) == ("Hello", 6)
    assert len(scheduler.submits) == 1
    finished = {"model_name": "m", "engine": "0", "finished_reason": "stop"}
    assert keeping.registry.get_sample_value("vllm:request_success_total", finished) == 1
    other = keeping.inference.GenerateStream(asked("other", request_id="same"))  # it is over: its id is free
    assert (await scheduler.heard(scheduler.submits, 2)).request_id == "same"
    other.cancel()


async def test_two_that_come_at_once_are_one(stack: Stack) -> None:
    """Without a window, too."""
    calls = [
        asyncio.ensure_future(stack.inference.Generate(gateway_pb2.GenerateRequest(input=asked(request_id="x").input)))
        for _ in range(5)
    ]
    submit = await stack.scheduler.heard(stack.scheduler.submits)
    await stack.scheduler.started(submit)
    (stream,) = stack.engine._entrance.streams
    await eventually(lambda: len(stream.request.readers) == 5)
    calls[0].cancel()
    await stack.scheduler.tokens(submit, b"y", end=LENGTH)
    assert [answer.choices[0].text for answer in await asyncio.gather(*calls[1:])] == ["y"] * 4
    assert len(stack.scheduler.submits) == 1
    assert stack.scheduler.cancels == []


async def test_a_failure_is_not_kept(keeping: Stack) -> None:
    scheduler, request = keeping.scheduler, asked(request_id="same")
    call = keeping.inference.GenerateStream(request)
    submit = await scheduler.heard(scheduler.submits)
    await scheduler.started(submit)
    await scheduler.fail(submit, Reason.EXECUTOR_LOST)
    with pytest.raises(grpc.aio.AioRpcError):
        await call.read()
    retried = keeping.inference.GenerateStream(request)
    await scheduler.heard(scheduler.submits, 2)
    retried.cancel()


async def test_log_probabilities_come_again_too(keeping: Stack) -> None:
    scheduler = keeping.scheduler
    request = asked("ab", logprobs={"output_count": 0, "prompt_count": 0})
    call = keeping.inference.GenerateStream(request)
    submit = await scheduler.heard(scheduler.submits)
    await scheduler.started(submit)
    prompt = types_pb2.TokenLogprobs(chosen=[-1, -2], ranks=[1, 2])
    scores = [types_pb2.TokenLogprobs(chosen=[-value], ranks=[1]) for value in (3, 4)]
    await scheduler.tokens(
        submit, b"x", logprobs=[{"handle": submit.handle, "prompt": prompt, "prompt_start": 1, "output": scores[0]}]
    )
    first, second = await call.read(), await call.read()
    assert len(first.prompt_logprobs) == 3
    await lose(call, keeping)
    await scheduler.tokens(submit, b"y", 1, end=LENGTH, logprobs=[{"handle": submit.handle, "output": scores[1]}])
    behind_prompt = [message async for message in keeping.inference.GenerateStream(again(request, first.event_id))]
    behind_x = [message async for message in keeping.inference.GenerateStream(again(request, second.event_id))]
    values = [
        [one.logprob for message in messages for one in message.logprobs] for messages in (behind_prompt, behind_x)
    ]
    assert values == [[-3, -4], [-4]]
    assert not any(message.prompt_logprobs for message in [*behind_prompt, *behind_x])


async def test_kept_streams_are_bounded(keeping: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.gateway.streams.MOST_KEPT", 3)
    scheduler = keeping.scheduler
    for index in range(6):
        call = keeping.inference.GenerateStream(asked(request_id=f"r{index}"))
        submit = await scheduler.heard(scheduler.submits, index + 1)
        await scheduler.started(submit)
        await scheduler.tokens(submit, b"x", end=LENGTH)
        assert [message.text async for message in call] == ["x"]
    kept = keeping.engine._entrance.streams._kept["default"]
    assert list(kept) == ["r3", "r4", "r5"]
    await eventually(lambda: not keeping.engine._entrance.streams._kept, seconds=5)


async def events(answer: httpx.Response) -> list[tuple[str, str]]:
    """(id, data) of all events."""
    found = []
    async for block in answer.aiter_text():
        for event in block.split("\n\n"):
            fields = dict(line.split(": ", 1) for line in event.splitlines())
            if fields:
                found.append((fields.get("id", ""), fields["data"]))
    return found


def content(found: list[tuple[str, str]]) -> Any:
    """All that the events say: text, scores and ends of each choice, the usage, the mark of the end."""
    choices: dict[int, list[Any]] = {}
    other = []
    for _, data in found:
        chunk = json.loads(data) if data != "[DONE]" else {"choices": [], "usage": data}
        other.append(chunk["usage"]) if chunk["usage"] else None
        for one in chunk["choices"]:
            kept = choices.setdefault(one["index"], ["", [], [], None])
            kept[0] += one["text"]
            if one["logprobs"] is not None:
                kept[1] += one["logprobs"]["token_logprobs"]
                kept[2] += one["logprobs"]["text_offset"]
            kept[3] = one["finish_reason"] or kept[3]
    return choices, other


@pytest.mark.parametrize("body", [{"n": 2}, {"prompt": ["a", "b"], "logprobs": 0}])
async def test_sse_goes_on_behind_its_last_event(keeping: Stack, body: dict[str, Any]) -> None:
    """From whatever event: what follows it is what followed it before, if perhaps in fewer pieces."""
    body = {"model": "m", "prompt": "hi", "stream": True, "stream_options": {"include_usage": True}} | body
    transport = httpx.ASGITransport(create_app(keeping.engine, Identity(None), keeping.engine.settings))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway", timeout=20) as http:
        running = asyncio.create_task(http.post("/v1/completions", json=body))
        prompts = body["prompt"] if isinstance(body["prompt"], list) else [body["prompt"]]
        await keeping.scheduler.heard(keeping.scheduler.submits, len(prompts))
        for submit in list(keeping.scheduler.submits):
            await keeping.scheduler.started(submit)
            for position, piece in enumerate(b"abc"):
                for choice in range(submit.choice_count):
                    scores = types_pb2.TokenLogprobs(chosen=[-1.0 - position], ranks=[1])
                    more = {"logprobs": [{"handle": submit.handle, "choice": choice, "output": scores}]}
                    await keeping.scheduler.tokens(
                        submit,
                        [piece],
                        position,
                        choice,
                        LENGTH if position == 2 else None,
                        **(more if submit.logprobs.HasField("output_count") else {}),
                    )
                    await asyncio.sleep(0.01)
        whole = await events(await running)
        assert whole[-1] == ("", "[DONE]")
        texts = [one for one in whole if one[0]]
        assert len({one[0] for one in texts}) == len(texts) > 4
        for index, (event_id, _) in enumerate(whole):
            if event_id:
                rest = await http.post("/v1/completions", json=body, headers={"last-event-id": event_id})
                assert rest.headers["x-request-id"] == event_id.rpartition(":")[0]
                assert content(await events(rest)) == content(whole[index + 1 :])
        last = texts[0][0]
        unstreamed = await http.post(
            "/v1/completions", json=body | {"stream": False, "stream_options": None}, headers={"last-event-id": last}
        )
        assert (unstreamed.status_code, unstreamed.json()["error"]["param"]) == (400, "last-event-id")
        strange = await http.post(
            "/v1/completions", json=body, headers={"last-event-id": "nobody:" + last.rpartition(":")[2]}
        )
        assert (strange.status_code, strange.json()["error"]["param"]) == (404, "last-event-id")
        mixed = {"last-event-id": last, "x-request-id": "another"}
        assert (await http.post("/v1/completions", json=body, headers=mixed)).status_code == 400
    assert len(keeping.scheduler.submits) == len(prompts)


async def test_without_a_window_there_are_no_event_ids(stack: Stack) -> None:
    call = stack.inference.GenerateStream(asked())
    submit = await stack.scheduler.heard(stack.scheduler.submits)
    assert submit.keep_ms == 0
    await stack.scheduler.started(submit)
    await stack.scheduler.tokens(submit, b"x", end=LENGTH)
    assert [message.event_id async for message in call] == [""]
