"""The other calls, readiness, drain, sizes and load."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import quire
from quire.client import Client, ClientError
from quire.v1 import admin_pb2, gateway_pb2, scheduler_pb2, types_pb2
from services.common.rpc import MAX_MESSAGE_BYTES
from tests.contract.gateway.conftest import Stack, eventually, running
from tests.contract.gateway.fake_scheduler import LENGTH, FakeScheduler
from tests.contract.gateway.test_generate import asked, reason_of
from tests.fixtures.vocabularies import BOS_ID, END_OF_TURN_ID, EOS_ID, START_OF_TURN_ID

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


async def health(stack: Stack, name: str = "") -> int:
    stub = health_pb2_grpc.HealthStub(stack.channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(service=name))).status


async def serve(scheduler: FakeScheduler, count: int, output: bytes = b"ok") -> None:
    """Answers that many requests, in order, in the background of a test."""
    for number in range(1, count + 1):
        submit = await scheduler.heard(scheduler.submits, number)
        await scheduler.started(submit)
        await scheduler.tokens(submit, output, end=LENGTH)


async def test_tokenize_and_detokenize(stack: Stack) -> None:
    """P1: text gets one beginning token, a text that begins with it no second one."""
    text = await stack.inference.Tokenize(gateway_pb2.TokenizeRequest(text="ab"))
    assert (list(text.token_ids), text.context_length) == ([BOS_ID, 97, 98], 512)
    twice = await stack.inference.Tokenize(gateway_pb2.TokenizeRequest(text="<|bos|>ab"))
    assert list(twice.token_ids) == [BOS_ID, 97, 98]
    plain = await stack.inference.Tokenize(gateway_pb2.TokenizeRequest(text="ab", skip_special_tokens=True))
    assert list(plain.token_ids) == [97, 98]
    chat = await stack.inference.Tokenize(
        gateway_pb2.TokenizeRequest(chat={"messages": [{"role": "u", "content": ""}]})
    )
    assert list(chat.token_ids[:3]) == [BOS_ID, START_OF_TURN_ID, ord("u")]
    assert list(chat.token_ids).count(BOS_ID) == 1

    ids = [*b"a", END_OF_TURN_ID, *b"b"]
    shown = await stack.inference.Detokenize(gateway_pb2.DetokenizeRequest(token_ids=ids))
    kept = await stack.inference.Detokenize(gateway_pb2.DetokenizeRequest(token_ids=ids, keep_special_tokens=True))
    assert (shown.text, kept.text) == ("ab", "a<|im_end|>b")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stack.inference.Detokenize(gateway_pb2.DetokenizeRequest(token_ids=[-1]))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert stack.scheduler.bundles_served == 1


async def test_admin_calls(stack: Stack) -> None:
    status = await stack.admin.GetStatus(admin_pb2.GetStatusRequest())
    assert (status.scheduler.running_count, status.open_request_count, status.version) == (3, 0, quire.__version__)
    changed = await stack.admin.ChangeModel(
        admin_pb2.ChangeModelRequest(action=scheduler_pb2.MODEL_ACTION_LOAD, name="m", source="folder")
    )
    assert [model.name for model in changed.models] == ["m"]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stack.admin.ChangeModel(
            admin_pb2.ChangeModelRequest(action=scheduler_pb2.MODEL_ACTION_LOAD, name="m", source="none")
        )
    assert reason_of(caught.value) == "MODEL_LOAD_FAILED"
    with pytest.raises(grpc.aio.AioRpcError, match="action"):
        await stack.admin.ChangeModel(admin_pb2.ChangeModelRequest(name="m"))


async def test_readiness_follows_scheduler_and_models(stack: Stack) -> None:
    """K4: ready only with a scheduler and a model; liveness does not depend on either."""
    names = ["", "quire.v1.InferenceService", "quire.v1.AdminService"]
    assert [await health(stack, name) for name in names] == [SERVING] * 3
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await health(stack, "other")
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND
    stack.scheduler.models = []
    await stack.scheduler.tell_models()
    await eventually(lambda: not stack.server.ready)
    assert await health(stack) == NOT_SERVING
    stack.scheduler.models = [stack.scheduler.model]
    await stack.scheduler.tell_models()
    await eventually(lambda: stack.server.ready)
    await stack.scheduler.stop()
    await eventually(lambda: not stack.server.ready)
    assert [await health(stack), await health(stack, "liveness")] == [NOT_SERVING, SERVING]
    assert not (await stack.admin.GetStatus(admin_pb2.GetStatusRequest())).HasField("scheduler")
    await stack.scheduler.start()
    await eventually(lambda: stack.server.ready)


async def test_drain_lets_running_requests_end(stack: Stack) -> None:
    call = stack.inference.GenerateStream(asked())
    submit = await stack.scheduler.heard(stack.scheduler.submits)
    await stack.scheduler.started(submit)
    draining = asyncio.ensure_future(stack.engine.drain())
    await eventually(lambda: not stack.server.ready)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stack.inference.GenerateStream(asked()).read()
    assert reason_of(caught.value) == "DRAINING"
    assert not draining.done()
    await stack.scheduler.tokens(submit, b"bye", end=LENGTH)
    assert "".join([m.text async for m in call]) == "bye"
    await asyncio.wait_for(draining, 5)


async def test_large_messages(tmp_path: Path) -> None:
    """L1: a prompt of 5 MiB and an answer above 4 MiB pass every hop; what is over the limit is refused by name."""
    scheduler = FakeScheduler(f"unix:{tmp_path}/s.sock", context_length=8 << 20)
    await scheduler.start()
    async with running(tmp_path, scheduler, max_prompt_bytes=5 << 20) as stack:
        await eventually(lambda: stack.engine.ready)
        prompt = gateway_pb2.GenerationInput(token_ids={"ids": [200] * (11 << 18)})  # two bytes each
        assert prompt.ByteSize() > 5 << 20
        call = asyncio.ensure_future(stack.inference.Generate(gateway_pb2.GenerateRequest(input=prompt)))
        submit = await scheduler.heard(scheduler.submits)
        assert len(submit.prompt_token_ids) == 11 << 18
        await scheduler.started(submit)
        await scheduler.tokens(submit, b"y" * (3 << 20), end=LENGTH)
        (choice,) = (await call).choices
        assert len(choice.text) == 3 << 20  # and as many ids beside it
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stack.inference.GenerateStream(asked("x" * (5 << 20) + "x")).read()
        assert reason_of(caught.value) == "TOO_LARGE"
        assert str(5 << 20) in caught.value.details()
        async with grpc.aio.insecure_channel(
            stack.engine.settings.listen, options=[("grpc.max_send_message_length", -1)]
        ) as unlimited:
            send = unlimited.unary_unary("/quire.v1.InferenceService/Tokenize")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await send(b"\x12" + b"x" * MAX_MESSAGE_BYTES)
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert str(MAX_MESSAGE_BYTES) in caught.value.details()
    await scheduler.stop()


async def test_the_loop_stays_free_while_large_prompts_are_read(stack: Stack) -> None:
    """K2: probes answer and short prompts pass while megabytes are tokenized."""
    longest = 0.0
    big = asyncio.ensure_future(stack.inference.Tokenize(gateway_pb2.TokenizeRequest(text="word " * 200_000)))
    while not big.done():
        before = time.monotonic()
        await stack.inference.Tokenize(gateway_pb2.TokenizeRequest(text="short"))
        assert await health(stack) == SERVING
        longest = max(longest, time.monotonic() - before)
        await asyncio.sleep(0.02)
    assert len((await big).token_ids) == 1_000_001
    assert longest < 1.0


async def test_one_tokenizer_serves_parallel_requests(stack: Stack) -> None:
    """P3: mixed lengths at once give the same counts as one after the other."""
    texts = [f"{n} " * (3000 if n % 8 == 0 else 3) for n in range(64)]
    calls = [stack.inference.Tokenize(gateway_pb2.TokenizeRequest(text=text)) for text in texts]
    assert [len((await call).token_ids) for call in calls] == [1 + len(text) for text in texts]


async def test_context_table(stack: Stack) -> None:
    """C2: at the limit less one exactly one token is left; what is over is refused at once."""
    answers: dict[tuple[int, int | None], str | int] = {}
    for length in (510, 511, 512, 513):
        for budget in (None, 0, 1, 2):
            stop = types_pb2.StopCriteria(max_tokens=budget)
            known = len(stack.scheduler.submits)
            call = stack.inference.GenerateStream(
                gateway_pb2.GenerateStreamRequest(input={"token_ids": {"ids": [65] * length}, "stop": stop})
            )
            reading = asyncio.ensure_future(call.read())
            await eventually(lambda at=known, task=reading: task.done() or len(stack.scheduler.submits) > at)
            if len(stack.scheduler.submits) > known:
                answers[length, budget] = stack.scheduler.submits[-1].stop.max_tokens
                call.cancel()
                await asyncio.wait([reading])
            else:
                error = reading.exception()
                assert isinstance(error, grpc.aio.AioRpcError)
                answers[length, budget] = reason_of(error)
    over, bad = "CONTEXT_EXCEEDED", "INVALID_FIELD"
    assert answers == {
        **{(510, None): 2, (510, 0): bad, (510, 1): 1, (510, 2): 2},
        **{(511, None): 1, (511, 0): bad, (511, 1): 1, (511, 2): over},
        **{(length, budget): over for length in (512, 513) for budget in (None, 0, 1, 2)},
    }


async def test_friendly_client(stack: Stack) -> None:
    target = stack.engine.settings.listen
    serving = asyncio.ensure_future(serve(stack.scheduler, 3, b"hello"))

    def talk() -> None:
        with Client(target) as client:
            assert [model.name for model in client.models()] == ["m"]
            answer = client.generate("hi", temperature=0.5, max_tokens=5, stop="zzz")
            assert (answer.text, answer.finish_reason, answer.completion_tokens) == ("hello", "length", 5)
            pieces = list(client.stream([BOS_ID, 97], seed=3, logprobs=None))
            assert "".join(piece.text for piece in pieces) == "hello"
            assert pieces[-1].finish_reason == "length"
            assert client.chat([{"role": "user", "content": "x"}]).text == "hello"
            assert client.detokenize(client.tokenize("ab")) == "ab"
            assert client.status().scheduler.running_count == 3
            assert client.change_model("load", "m", "folder")
            with pytest.raises(ClientError) as caught:
                client.generate("hi", top_p=7)
            assert caught.value.reason == "INVALID_FIELD"
            with pytest.raises(TypeError, match="warmth"):
                client.generate("hi", warmth=1)

    await asyncio.to_thread(talk)
    await serving
    assert stack.scheduler.submits[0].sampling.temperature == 0.5
    assert stack.scheduler.submits[1].sampling.seed == 3
    assert list(stack.scheduler.submits[1].prompt_token_ids) == [BOS_ID, 97]
    assert EOS_ID not in stack.scheduler.submits[2].prompt_token_ids
