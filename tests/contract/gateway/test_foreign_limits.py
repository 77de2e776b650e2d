"""Other protocols are other doors to the same house: keys, tenants and limits hold behind each of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from quire.v1 import gateway_pb2
from quire.v1.foreign import open_inference_pb2, smg_common_pb2, vllm_engine_pb2
from quire.v1.foreign.open_inference_pb2_grpc import GRPCInferenceServiceStub
from quire.v1.foreign.vllm_engine_pb2_grpc import VllmEngineStub
from tests.contract.gateway.conftest import Stack
from tests.contract.gateway.fake_scheduler import LENGTH, FakeScheduler
from tests.contract.gateway.keys import ACME, BLUE
from tests.contract.gateway.test_identity import key
from tests.contract.gateway.test_limits import gateway, limited
from tests.contract.gateway.test_open_inference import asked as inference_request
from tests.contract.gateway.test_open_inference import texts
from tests.contract.gateway.test_vllm_engine import asked as engine_request


def refused(error: grpc.aio.AioRpcError) -> str:
    """The message of a limit, which comes with how long to wait."""
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    details = rpc_status.from_call(error).details
    retry = error_details_pb2.RetryInfo()
    assert any(detail.Unpack(retry) for detail in details)
    return error.details() or ""


async def read(stack: Stack, call: Any) -> list[Any]:
    """The answer to a request that the scheduler gives two tokens."""
    submit = await stack.scheduler.heard(stack.scheduler.submits)
    assert (submit.tenant, submit.tenant_weight) == ("acme", 2.5)
    await stack.scheduler.started(submit)
    await stack.scheduler.tokens(submit, b"ab", end=LENGTH)
    return [message async for message in call]


async def test_a_request_counts_wherever_it_comes_in(tmp_path: Path, scheduler: FakeScheduler) -> None:
    async with gateway(tmp_path, scheduler, limited(tmp_path, "requests_per_minute = 1")) as stack:
        engine, inference = VllmEngineStub(stack.channel), GRPCInferenceServiceStub(stack.channel)
        call = engine.Generate(engine_request(), metadata=key(ACME))
        assert [message.WhichOneof("response") for message in await read(stack, call)] == ["chunk", "complete"]
        assert dict(await call.initial_metadata())["x-ratelimit-remaining-requests"] == "0"
        calls = [
            lambda: engine.Generate(engine_request(), metadata=key(ACME)).read(),
            lambda: engine.Embed(vllm_engine_pb2.EmbedRequest(tokenized={"input_ids": [5]}), metadata=key(ACME)),
            lambda: anext(aiter(engine.GetTokenizer(smg_common_pb2.GetTokenizerRequest(), metadata=key(ACME)))),
            lambda: inference.ModelInfer(inference_request(), metadata=key(ACME)),
            lambda: stack.inference.Embed(gateway_pb2.EmbedRequest(text="a"), metadata=key(ACME)),
        ]
        for ask in calls:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await ask()
            assert "requests_per_minute" in refused(caught.value)
        stream = inference.ModelStreamInfer(iter([inference_request()]), metadata=key(ACME))
        assert ["requests_per_minute" in message.error_message async for message in stream] == [True]
        assert len(scheduler.submits) == 1


async def test_caps_of_a_key_hold(tmp_path: Path, scheduler: FakeScheduler) -> None:
    caps = 'models = ["other"]'
    async with gateway(tmp_path, scheduler, limited(tmp_path, "max_output_tokens = 3", caps)) as stack:
        engine, inference = VllmEngineStub(stack.channel), GRPCInferenceServiceStub(stack.channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await engine.Generate(engine_request(), metadata=key(ACME)).read()
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND
        ready = await inference.ModelReady(open_inference_pb2.ModelReadyRequest(name="m"), metadata=key(ACME))
        assert not ready.ready
        ready = await inference.ModelReady(open_inference_pb2.ModelReadyRequest(name="m"), metadata=key(BLUE))
        assert ready.ready


async def test_a_stream_is_of_one_caller(tmp_path: Path, scheduler: FakeScheduler) -> None:
    async with gateway(tmp_path, scheduler, limited(tmp_path, "max_output_tokens = 3")) as stack:
        inference = GRPCInferenceServiceStub(stack.channel)
        request = inference_request(stream=True, parameters={"max_tokens": {"int64_param": 4}})
        stream = inference.ModelStreamInfer(iter([request]), metadata=key(ACME))
        assert ["max_tokens: 4 is above 3" in message.error_message async for message in stream] == [True]
        request.parameters["max_tokens"].int64_param = 2
        messages = await read(stack, inference.ModelStreamInfer(iter([request]), metadata=key(ACME)))
        assert [texts(message.infer_response) for message in messages] == [["ab"]]


async def test_an_abort_reaches_its_tenant_s_requests_alone(tmp_path: Path, scheduler: FakeScheduler) -> None:
    async with gateway(tmp_path, scheduler, limited(tmp_path, "")) as stack:
        engine = VllmEngineStub(stack.channel)
        call = engine.Generate(engine_request(), metadata=key(ACME))
        await scheduler.heard(scheduler.submits)
        await engine.Abort(vllm_engine_pb2.AbortRequest(request_ids=["chatcmpl-1"]), metadata=key(BLUE))
        assert [message.WhichOneof("response") for message in await read(stack, call)] == ["chunk", "complete"]
