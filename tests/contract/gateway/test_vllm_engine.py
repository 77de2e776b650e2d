"""VllmEngine against a scripted scheduler: what a router sends, what it is told."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

import grpc
import pytest

from quire.v1 import kvmanager_pb2, scheduler_pb2, types_pb2
from quire.v1.foreign import smg_common_pb2 as common
from quire.v1.foreign import vllm_engine_pb2 as vllm
from quire.v1.foreign.vllm_engine_pb2_grpc import VllmEngineStub
from services.common.errors import Reason
from tests.contract.gateway.conftest import Stack
from tests.contract.gateway.fake_scheduler import LENGTH, STOP
from tests.contract.gateway.test_generate import reason_of
from tests.fixtures.vocabularies import BOS_ID, EOS_ID


@pytest.fixture
def engine(stack: Stack) -> Any:
    return VllmEngineStub(stack.channel)


def asked(ids: list[int] | None = None, *, stream: bool = True, **params: Any) -> vllm.GenerateRequest:
    return vllm.GenerateRequest(
        request_id="chatcmpl-1",
        tokenized={"original_text": "hi", "input_ids": ids or [BOS_ID, *b"hi"]},
        sampling_params=params,
        stream=stream,
    )


async def test_a_stream_has_chunks_and_an_end(stack: Stack, engine: Any) -> None:
    call = engine.Generate(asked(max_tokens=9, stop_token_ids=[7]))
    submit = await stack.scheduler.heard(stack.scheduler.submits)
    assert (submit.request_id, list(submit.prompt_token_ids)) == ("chatcmpl-1", [BOS_ID, *b"hi"])
    assert (submit.stop.max_tokens, list(submit.stop.stop_token_ids)) == (9, [7])
    await stack.scheduler.started(submit, cached=2)
    await stack.scheduler.tokens(submit, b"He")
    messages = aiter(call)
    first = await anext(messages)
    assert list(first.chunk.token_ids) == [*b"He"]
    assert (first.chunk.prompt_tokens, first.chunk.completion_tokens, first.chunk.cached_tokens) == (3, 2, 2)
    await stack.scheduler.tokens(submit, [*b"y", 7], position=2, end=STOP)
    second, last = [message async for message in messages]
    assert (list(second.chunk.token_ids), second.chunk.completion_tokens) == ([*b"y", 7], 4)
    assert list(last.complete.output_ids) == [*b"Hey", 7]
    assert (last.complete.finish_reason, last.complete.matched_token_id) == ("stop", 7)
    assert (last.complete.prompt_tokens, last.complete.completion_tokens) == (3, 4)


async def test_without_stream_there_is_one_end_for_each_choice(stack: Stack, engine: Any) -> None:
    """The model's own end tokens are ends like others, but not told as matches."""
    call = engine.Generate(asked(stream=False, n=2))
    submit = await stack.scheduler.heard(stack.scheduler.submits)
    await stack.scheduler.started(submit)
    await stack.scheduler.tokens(submit, b"b", choice=1, end=LENGTH)
    await stack.scheduler.tokens(submit, [*b"a", EOS_ID], end=STOP)
    ends = [message.complete async for message in call]
    assert [(end.index, end.finish_reason, list(end.output_ids)) for end in ends] == [
        (1, "length", [*b"b"]),
        (0, "stop", [*b"a", EOS_ID]),
    ]
    assert [end.WhichOneof("matched_stop") for end in ends] == [None, None]


async def test_stop_strings_are_matched_here(stack: Stack, engine: Any) -> None:
    call = engine.Generate(asked(stream=False, stop=["ll"]))
    submit = await stack.scheduler.heard(stack.scheduler.submits)
    await stack.scheduler.started(submit)
    await stack.scheduler.tokens(submit, b"Hello")
    [message] = [message async for message in call]
    assert (list(message.complete.output_ids), message.complete.matched_stop_str) == ([*b"Hell"], "ll")


async def test_what_is_absent_or_zero_means_nothing(stack: Stack, engine: Any) -> None:
    calls = [engine.Generate(asked(max_tokens=1)), engine.Generate(vllm.GenerateRequest(text="hi"))]
    for number in (1, 2):
        submit = await stack.scheduler.heard(stack.scheduler.submits, number)
        assert list(submit.prompt_token_ids) == [BOS_ID, *b"hi"]
        for name in ("temperature", "top_p", "repetition_penalty"):
            assert not submit.sampling.HasField(name)
        assert submit.choice_count == 1
    for call in calls:
        call.cancel()


async def test_sampling_and_rules_pass(stack: Stack, engine: Any) -> None:
    params = {
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 4,
        "min_p": 0.125,
        "frequency_penalty": 1.0,
        "presence_penalty": -1.0,
        "repetition_penalty": 2.0,
        "min_tokens": 2,
        "max_tokens": 5,
        "ignore_eos": True,
        "seed": -3,
        "logit_bias": {5: 1.5},
        "include_stop_str_in_output": True,
        "choice": {"choices": ["yes", "no"]},
    }
    call = engine.Generate(asked(**params))
    submit = await stack.scheduler.heard(stack.scheduler.submits)
    assert submit.sampling == types_pb2.SamplingParams(
        temperature=0.5,
        top_p=0.25,
        top_k=4,
        min_p=0.125,
        frequency_penalty=1.0,
        presence_penalty=-1.0,
        repetition_penalty=2.0,
        seed=-3,
        logit_bias={5: 1.5},
    )
    assert submit.stop == types_pb2.StopCriteria(max_tokens=5, min_tokens=2, ignore_eos=True, include_stop=True)
    assert list(submit.constraint.choice.values) == ["yes", "no"]
    call.cancel()


async def test_scores_come_with_their_tokens(stack: Stack, engine: Any) -> None:
    """Of the prompt with the first chunk, of a whole answer with its end."""
    scores = types_pb2.TokenLogprobs(
        chosen=[-0.5], ranks=[1], top_count=2, top_token_ids=[98, 99], top_logprobs=[-0.5, -1.5]
    )
    prompt = types_pb2.TokenLogprobs(
        chosen=[-1, -2], ranks=[1, 1], top_count=1, top_token_ids=[5, 6], top_logprobs=[-1, -2]
    )
    for stream in (True, False):
        call = engine.Generate(asked(stream=stream, logprobs=2, prompt_logprobs=1))
        submit = await stack.scheduler.heard(stack.scheduler.submits, 1 + (not stream))
        await stack.scheduler.started(submit)
        told = scheduler_pb2.ChoiceLogprobs(handle=submit.handle, output=scores, prompt=prompt, prompt_start=1)
        await stack.scheduler.tokens(submit, b"b", end=LENGTH, logprobs=[told])
        messages = [message async for message in call]
        found = messages[0].chunk if stream else messages[0].complete
        assert list(found.output_logprobs.token_logprobs) == [-0.5]
        assert list(found.output_logprobs.top_logprobs[0].token_ids) == [98, 99]
        assert [one.HasField("value") for one in found.input_logprobs.token_logprobs] == [False, True, True]
        assert list(found.input_logprobs.token_ids) == [BOS_ID, *b"hi"]
        if stream:
            assert not messages[1].complete.HasField("input_logprobs")


async def test_an_abort_ends_the_stream_with_what_is_there(stack: Stack, engine: Any) -> None:
    call = engine.Generate(asked())
    submit = await stack.scheduler.heard(stack.scheduler.submits)
    await stack.scheduler.started(submit)
    await stack.scheduler.tokens(submit, b"He")
    messages = aiter(call)
    assert list((await anext(messages)).chunk.token_ids) == [*b"He"]
    await engine.Abort(vllm.AbortRequest(request_ids=["other", "chatcmpl-1"]))
    [last] = [message async for message in messages]
    assert (last.complete.finish_reason, list(last.complete.output_ids)) == ("abort", [*b"He"])
    assert await stack.scheduler.heard(stack.scheduler.cancels) == submit.handle


async def test_a_failure_keeps_its_status(stack: Stack, engine: Any) -> None:
    call = engine.Generate(asked())
    submit = await stack.scheduler.heard(stack.scheduler.submits)
    await stack.scheduler.started(submit)
    await stack.scheduler.fail(submit, Reason.EXECUTOR_LOST)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (vllm.GenerateRequest(), "input"),
        (vllm.GenerateRequest(tokenized={}), "tokenized.input_ids"),
        (vllm.GenerateRequest(tokenized={"input_ids": [2**32 - 1]}), "tokenized.input_ids"),
        (vllm.GenerateRequest(tokenized={"input_ids": [10**6]}), "tokenized.input_ids"),
        (vllm.GenerateRequest(text="a", mm_inputs=b""), "mm_inputs"),
        (vllm.GenerateRequest(text="a", extra_mm_inputs=[b""]), "extra_mm_inputs"),
        (vllm.GenerateRequest(text="a", media_refs=b""), "media_refs"),
        (vllm.GenerateRequest(text="a", kv_transfer_params_json="{}"), "kv_transfer_params_json"),
        (vllm.GenerateRequest(text="a", data_parallel_rank=1), "data_parallel_rank"),
        (asked(temperature=-1), "sampling_params.temperature"),
        (asked(top_p=7), "sampling_params.top_p"),
        (asked(top_k=2**32 - 1), "sampling_params.top_k"),
        (asked(max_tokens=0), "sampling_params.max_tokens"),
        (asked(max_tokens=2**32 - 1), "sampling_params.max_tokens"),
        (asked(n=2**32 - 1), "sampling_params.n"),
        (asked(n=65), "sampling_params.n"),
        (asked(logprobs=-1), "sampling_params.logprobs"),
        (asked(prompt_logprobs=21), "sampling_params.prompt_logprobs"),
        (asked(logit_bias={-1: 1.0}), "sampling_params.logit_bias"),
        (asked(stop=[""]), "sampling_params.stop"),
        (asked(stop_token_ids=[2**31]), "sampling_params.stop_token_ids"),
        (asked(regex="[a"), "sampling_params.regex"),
        (asked(truncate_prompt_tokens=5), "sampling_params.truncate_prompt_tokens"),
    ],
)
async def test_bad_fields_are_named(stack: Stack, engine: Any, request_: vllm.GenerateRequest, field: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await engine.Generate(request_).read()
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert (caught.value.details() or "").startswith(f"{field}:"), caught.value.details()
    assert not stack.scheduler.submits


async def test_embed(stack: Stack, engine: Any) -> None:
    request = vllm.EmbedRequest(request_id="e", tokenized={"input_ids": [5, 6]})
    call = asyncio.ensure_future(engine.Embed(request))
    submit = await stack.scheduler.heard(stack.scheduler.submits)
    await stack.scheduler.started(submit)
    await stack.scheduler.vector(submit, [0.5, 0.5, 0.5, 0.5])
    assert await call == vllm.EmbedResponse(embedding=[0.5] * 4, prompt_tokens=2, embedding_dim=4)
    with pytest.raises(grpc.aio.AioRpcError, match=r"tokenized\.input_ids"):
        await engine.Embed(vllm.EmbedRequest(request_id="e"))


async def test_what_a_router_asks_before_it_routes(stack: Stack, engine: Any) -> None:
    assert (await engine.HealthCheck(vllm.HealthCheckRequest())).healthy
    info = await engine.GetModelInfo(vllm.GetModelInfoRequest())
    assert (info.served_model_name, info.is_generation, info.max_context_length) == ("m", True, 512)
    assert (list(info.eos_token_ids), info.bos_token_id) == (list(stack.scheduler.model.eos_token_ids), BOS_ID)
    server = await engine.GetServerInfo(vllm.GetServerInfoRequest())
    assert (server.server_type, server.data_parallel_size, server.active_requests) == ("vllm-grpc", 1, 0)
    loads = await engine.GetLoads(vllm.GetLoadsRequest())
    assert [load.num_running_reqs for load in loads.loads] == [3]
    pieces = [piece async for piece in engine.GetTokenizer(common.GetTokenizerRequest())]
    assert hashlib.sha256(b"".join(piece.data for piece in pieces)).hexdigest() == pieces[-1].sha256
    assert not any(piece.sha256 for piece in pieces[:-1])
    stack.scheduler.models = []
    await stack.scheduler.tell_models()
    while (await engine.HealthCheck(vllm.HealthCheckRequest())).healthy:
        await asyncio.sleep(0.01)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await engine.GetModelInfo(vllm.GetModelInfoRequest())
    assert reason_of(caught.value) == "MODEL_NOT_FOUND"


async def test_kv_events_are_of_the_whole_gateway(stack: Stack, engine: Any) -> None:
    """Two executors hold the same block: it is stored once, and gone when the second copy is."""
    key, parent = bytes(range(32)), bytes(32)

    def batch(number: int, executor: str, **fields: Any) -> kvmanager_pb2.SubscribeEventsResponse:
        return kvmanager_pb2.SubscribeEventsResponse(
            sequence_number=number, timestamp_ms=1500, executor_id=executor, **fields
        )

    stored = kvmanager_pb2.BlockStored(key=key, parent_key=parent, token_ids=[1, 2], block_size=2)
    unknown = kvmanager_pb2.BlockStored(key=parent, block_size=2)
    stack.scheduler.kv_events = [
        batch(1, "a", stored=[stored, unknown]),
        batch(2, "b", stored=[stored]),
        batch(3, "a", removed=[kvmanager_pb2.BlockRemoved(key=key)]),
        batch(4, "b", cleared=True),
    ]
    told = [one async for one in engine.SubscribeKvEvents(common.SubscribeKvEventsRequest(start_sequence_number=1))]
    number = int.from_bytes(key[:8], "big", signed=True)
    assert [one.sequence_number for one in told] == [1, 2, 3, 4]
    assert told[0].timestamp == 1.5
    [event] = told[0].events
    assert event.stored == common.KvBlocksStored(
        blocks=[common.KvBlock(block_hash=number, token_ids=[1, 2], block_size=2, cache_level=0)], parent_block_hash=0
    )
    assert [len(one.events) for one in told[1:3]] == [0, 0]
    [event] = told[3].events
    assert list(event.removed.block_hashes) == [number]
