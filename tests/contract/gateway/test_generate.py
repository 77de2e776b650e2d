"""Generation over gRPC against a scripted scheduler."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from quire.v1 import gateway_pb2, scheduler_pb2, types_pb2
from services.common.errors import Reason
from tests.contract.gateway.conftest import Stack, eventually, running
from tests.contract.gateway.fake_scheduler import LENGTH, STOP, FakeScheduler
from tests.fixtures.vocabularies import BOS_ID, END_OF_TURN, END_OF_TURN_ID, EOS_ID


def asked(text: str = "hi", **fields: Any) -> gateway_pb2.GenerateStreamRequest:
    return gateway_pb2.GenerateStreamRequest(input=gateway_pb2.GenerationInput(text=text, **fields))


async def read_texts(call: Any, texts: list[str]) -> None:
    async for message in call:
        texts.append(message.text)


def reason_of(error: grpc.aio.AioRpcError) -> str:
    for detail in rpc_status.from_call(error).details:
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info):
            return info.reason
    raise AssertionError("no ErrorInfo")


async def test_stream_has_text_usage_and_one_bos(stack: Stack) -> None:
    """P1 too: the prompt has exactly one beginning token."""
    call = stack.inference.GenerateStream(asked("hi", request_id="r-1"))
    submit = await stack.scheduler.heard(stack.scheduler.submits)
    assert list(submit.prompt_token_ids) == [BOS_ID, *b"hi"]
    assert (submit.request_id, submit.tenant, submit.choice_count) == ("r-1", "default", 1)
    assert submit.stop.max_tokens == 512 - 3
    assert submit.sampling.HasField("seed")
    await stack.scheduler.started(submit, cached=2)
    await stack.scheduler.tokens(submit, b"Hel")
    messages = aiter(call)
    first = await anext(messages)
    await stack.scheduler.tokens(submit, [*b"lo", EOS_ID], position=3, end=STOP)
    rest = [message async for message in messages]
    assert first.text == "Hel"
    assert "".join(m.text for m in [first, *rest]) == "Hello"
    last = rest[-1]
    assert (last.finish_reason, last.matched_token_id) == (STOP, EOS_ID)
    assert last.usage == types_pb2.Usage(prompt_tokens=3, completion_tokens=6, cached_tokens=2)
    assert list(last.token_ids)[-1] == EOS_ID
    assert len(stack.engine._table) == 0


async def test_incomplete_characters_are_held(stack: Stack) -> None:
    """A1: no delta shows a replacement character."""
    call = stack.inference.GenerateStream(asked())
    submit = await stack.scheduler.heard(stack.scheduler.submits)
    await stack.scheduler.started(submit)
    output = "\U0001f600\U0001f680ok".encode()
    texts = []
    for position, byte in enumerate(output):
        end = LENGTH if position == len(output) - 1 else None
        await stack.scheduler.tokens(submit, [byte], position=position, end=end)
        texts.append((await call.read()).text)
    assert "".join(texts) == "\U0001f600\U0001f680ok"
    assert not any("\ufffd" in text for text in texts)


async def test_unary_answers_all_choices_in_order(stack: Stack) -> None:
    request = gateway_pb2.GenerateRequest(input=asked(choice_count=2).input)
    call = asyncio.ensure_future(stack.inference.Generate(request))
    submit = await stack.scheduler.heard(stack.scheduler.submits)
    await stack.scheduler.started(submit)
    await stack.scheduler.tokens(submit, b"one", choice=1, end=LENGTH)
    await stack.scheduler.tokens(submit, [*b"zero", EOS_ID], choice=0, end=STOP)
    answer = await call
    assert [c.text for c in answer.choices] == ["zero", "one"]
    assert [c.finish_reason for c in answer.choices] == [STOP, LENGTH]
    assert answer.usage.completion_tokens == 8
    finished = {"model_name": "m", "engine": "0", "finished_reason": "length"}
    assert stack.registry.get_sample_value("vllm:request_success_total", finished) == 1  # N1: once, whatever n is
    labels = {"model_name": "m", "engine": "0"}
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_generation_tokens"):
        assert stack.registry.get_sample_value(f"vllm:{name}_count", labels) == 1
    assert stack.registry.get_sample_value("vllm:request_generation_tokens_sum", labels) == 8
    assert stack.registry.get_sample_value("vllm:inter_token_latency_seconds_count", labels) == 0


async def test_logprobs_of_prompt_and_output(stack: Stack) -> None:
    """B8: as many alternatives as asked, and the chosen token's own value."""
    call = stack.inference.GenerateStream(asked("ab", logprobs={"output_count": 2, "prompt_count": 1}))
    submit = await stack.scheduler.heard(stack.scheduler.submits)
    await stack.scheduler.started(submit)
    prompt = types_pb2.TokenLogprobs(chosen=[-1, -2], ranks=[1, 2], top_count=1, top_token_ids=[97, 99])
    prompt.top_logprobs.extend([-1, -0.5])
    output = types_pb2.TokenLogprobs(chosen=[-3], ranks=[7], top_count=2, top_token_ids=[200, 201])
    output.top_logprobs.extend([-0.25, float("-inf")])
    entries = [
        scheduler_pb2.ChoiceLogprobs(handle=submit.handle, prompt=prompt, prompt_start=1),
        scheduler_pb2.ChoiceLogprobs(handle=submit.handle, output=output),
    ]
    await stack.scheduler.tokens(submit, b"x", end=LENGTH, logprobs=entries)
    first, last = [message async for message in call]
    assert [token.token_id for token in first.prompt_logprobs] == [BOS_ID, *b"ab"]
    assert not first.prompt_logprobs[0].HasField("logprob")
    assert [token.logprob for token in first.prompt_logprobs[1:]] == [-1, -2]
    (token,) = last.logprobs
    assert (token.token, token.logprob, token.rank) == (b"x", -3, 7)
    assert [(t.token_id, t.logprob, t.rank) for t in token.top] == [(200, -0.25, 1), (201, float("-inf"), 2)]


async def test_stop_string_across_tokens(tmp_path: Path) -> None:
    """A3: nothing of the stop string leaks, usage is cut, and the scheduler hears where the choice ended."""
    scheduler = FakeScheduler(f"unix:{tmp_path}/s.sock", extra=["BC", "EF"])
    await scheduler.start()
    async with running(tmp_path, scheduler) as stack:
        await eventually(lambda: stack.engine.ready)
        call = stack.inference.GenerateStream(asked(stop={"stop": ["BCDE", "CDX"], "max_tokens": 50}))
        submit = await scheduler.heard(scheduler.submits)
        await scheduler.started(submit)
        for position, token in enumerate([ord("A"), 260, ord("D"), 261]):
            await scheduler.tokens(submit, [token], position=position)
        await scheduler.tokens(submit, b"overshoot", position=4)
        messages = [message async for message in call]
        stop = await scheduler.heard(scheduler.stops)
    await scheduler.stop()
    assert "".join(m.text for m in messages) == "A"
    assert (messages[-1].finish_reason, messages[-1].matched_stop) == (STOP, "BCDE")
    assert messages[-1].usage.completion_tokens == 4
    assert (stop.handle, stop.choice, stop.output_length) == (submit.handle, 0, 4)
    assert sum(len(m.token_ids) for m in messages) == 4


async def test_stop_string_that_spells_a_special_token(stack: Stack) -> None:
    """A5: it matches although special tokens are not shown; and a stop token leaves the text before it whole."""
    call = stack.inference.GenerateStream(asked(stop={"stop": [END_OF_TURN], "ignore_eos": True}))
    submit = await stack.scheduler.heard(stack.scheduler.submits)
    await stack.scheduler.started(submit)
    await stack.scheduler.tokens(submit, [*b"Hi.", END_OF_TURN_ID, *b"more"])
    messages = [message async for message in call]
    assert "".join(m.text for m in messages) == "Hi."
    assert messages[-1].matched_stop == END_OF_TURN

    call = stack.inference.GenerateStream(asked(stop={"stop_token_ids": [ord("!")], "stop": ["never"]}))
    submit = await stack.scheduler.heard(stack.scheduler.submits, 2)
    await stack.scheduler.started(submit)
    await stack.scheduler.tokens(submit, [*b"Hi.", ord("!")])  # its end comes in a message of its own
    await stack.scheduler.say(
        ended=[scheduler_pb2.ChoiceEnd(handle=submit.handle, reason=STOP, stop_token_id=ord("!"))]
    )
    messages = [message async for message in call]
    assert "".join(m.text for m in messages) == "Hi."
    assert messages[-1].usage.completion_tokens == 4


async def test_held_text_comes_out_at_the_end(stack: Stack) -> None:
    call = stack.inference.GenerateStream(asked(stop={"stop": ["abcd"]}))
    submit = await stack.scheduler.heard(stack.scheduler.submits)
    await stack.scheduler.started(submit)
    await stack.scheduler.tokens(submit, b"xabc", end=LENGTH)
    assert "".join([m.text async for m in call]) == "xabc"


async def test_cancelled_call_cancels_the_request(stack: Stack) -> None:
    call = stack.inference.GenerateStream(asked())
    submit = await stack.scheduler.heard(stack.scheduler.submits)
    await stack.scheduler.started(submit)
    await stack.scheduler.tokens(submit, b"a")
    await call.read()
    call.cancel()
    assert await stack.scheduler.heard(stack.scheduler.cancels) == submit.handle
    await eventually(lambda: len(stack.engine._table) == 0)
    labels = {"model_name": "m", "engine": "0", "finished_reason": "abort"}
    assert stack.registry.get_sample_value("vllm:request_success_total", labels) == 1


async def test_deadline_ends_the_request(stack: Stack) -> None:
    call = stack.inference.GenerateStream(asked(), timeout=0.5)
    submit = await stack.scheduler.heard(stack.scheduler.submits)
    assert 0 < submit.deadline_ms <= 500
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert await stack.scheduler.heard(stack.scheduler.cancels) == submit.handle


async def test_error_in_mid_stream_is_a_status(stack: Stack) -> None:
    """A7: tokens first, then a status that is not OK; the other choice is cancelled."""
    call = stack.inference.GenerateStream(asked(choice_count=2))
    submit = await stack.scheduler.heard(stack.scheduler.submits)
    await stack.scheduler.started(submit)
    await stack.scheduler.tokens(submit, b"five!")
    await stack.scheduler.fail(submit, Reason.EXECUTOR_LOST, choice=1)
    texts: list[str] = []
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read_texts(call, texts)
    assert "".join(texts) == "five!"
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    assert reason_of(caught.value) == "EXECUTOR_LOST"
    assert await stack.scheduler.heard(stack.scheduler.cancels) == submit.handle


async def test_gap_is_an_error_and_repeats_are_dropped(stack: Stack) -> None:
    call = stack.inference.GenerateStream(asked())
    submit = await stack.scheduler.heard(stack.scheduler.submits)
    await stack.scheduler.started(submit)
    await stack.scheduler.tokens(submit, b"abc")
    await stack.scheduler.tokens(submit, b"bcd", position=1)
    await stack.scheduler.tokens(submit, b"f", position=5)
    texts: list[str] = []
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read_texts(call, texts)
    assert "".join(texts) == "abcd"
    assert reason_of(caught.value) == "PROTOCOL"
    assert await stack.scheduler.heard(stack.scheduler.cancels) == submit.handle


async def test_the_id_of_another_request_is_refused_while_that_runs(stack: Stack) -> None:
    call = stack.inference.GenerateStream(asked(request_id="same"))
    submit = await stack.scheduler.heard(stack.scheduler.submits)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stack.inference.GenerateStream(asked("other", request_id="same")).read()
    assert caught.value.code() == grpc.StatusCode.ALREADY_EXISTS
    await stack.scheduler.started(submit)
    await stack.scheduler.tokens(submit, b"x", end=LENGTH)
    assert [m.text async for m in call] == ["x"]
    again = stack.inference.GenerateStream(asked(request_id="same"))
    await stack.scheduler.heard(stack.scheduler.submits, 2)
    again.cancel()


async def test_bad_values_never_reach_the_scheduler(stack: Stack) -> None:
    """B4, B6, C1: refused by name; a good request right after is answered."""
    bad = [
        (asked(sampling={"temperature": float("nan")}), "sampling.temperature"),
        (asked(sampling={"logit_bias": {264: 1.0}}), "sampling.logit_bias"),
        (gateway_pb2.GenerateStreamRequest(input={"token_ids": {"ids": [264]}}), "token_ids"),
        (gateway_pb2.GenerateStreamRequest(input={"token_ids": {}}), "token_ids"),
        (gateway_pb2.GenerateStreamRequest(input={"chat": {}}), "chat.messages"),
        (gateway_pb2.GenerateStreamRequest(), "prompt"),
    ]
    for request, field in bad:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stack.inference.GenerateStream(request).read()
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert field in caught.value.details()
    assert stack.scheduler.submits == []
    call = stack.inference.GenerateStream(asked(""))  # generation from the beginning token
    submit = await stack.scheduler.heard(stack.scheduler.submits)
    assert list(submit.prompt_token_ids) == [BOS_ID]
    await stack.scheduler.started(submit)
    await stack.scheduler.tokens(submit, b"ok", end=LENGTH)
    assert "".join([m.text async for m in call]) == "ok"


async def test_unknown_model_is_named(stack: Stack) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stack.inference.GenerateStream(asked(model="other")).read()
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND
    assert "'other'" in caught.value.details()
