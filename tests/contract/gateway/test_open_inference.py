"""The Open Inference Protocol against a scripted scheduler."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

import quire
from quire.v1.foreign import open_inference_pb2 as oip
from quire.v1.foreign.open_inference_pb2_grpc import GRPCInferenceServiceStub
from services.common.errors import Reason
from tests.contract.gateway.conftest import Stack
from tests.contract.gateway.fake_scheduler import LENGTH, STOP
from tests.fixtures.vocabularies import BOS_ID, EOS_ID


@pytest.fixture
def inference(stack: Stack) -> Any:
    return GRPCInferenceServiceStub(stack.channel)


def packed(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<I", len(data)) + data


def asked(text: str = "hi", *, parameters: dict[str, Any] | None = None, **inputs: str | bool) -> oip.ModelInferRequest:
    """A request as tritonclient writes it: contents are raw."""
    request = oip.ModelInferRequest(model_name="m", id="r-1", parameters=parameters)
    for name, value in {"text_input": text, **inputs}.items():
        request.inputs.add(name=name, datatype="BYTES" if isinstance(value, str) else "BOOL", shape=[1])
        request.raw_input_contents.append(packed(value) if isinstance(value, str) else bytes([value]))
    return request


def texts(response: oip.ModelInferResponse, name: str = "text_output") -> list[str]:
    """The elements of an output."""
    [(tensor, raw)] = [
        (tensor, raw)
        for tensor, raw in zip(response.outputs, response.raw_output_contents, strict=True)
        if tensor.name == name
    ]
    assert tensor.datatype == "BYTES"
    found = []
    while raw:
        (size,) = struct.unpack_from("<I", raw)
        found.append(raw[4 : 4 + size].decode())
        raw = raw[4 + size :]
    assert list(tensor.shape) == [len(found)]
    return found


class Stream:
    """A stream whose requests are sent one by one."""

    def __init__(self, inference: Any, **options: Any) -> None:
        self._requests: asyncio.Queue[oip.ModelInferRequest | None] = asyncio.Queue()
        self.call = inference.ModelStreamInfer(self._sent(), **options)
        self.messages = aiter(self.call)

    async def _sent(self) -> AsyncIterator[oip.ModelInferRequest]:
        while (request := await self._requests.get()) is not None:
            yield request

    def send(self, request: oip.ModelInferRequest | None) -> None:
        self._requests.put_nowait(request)


async def test_who_is_there(stack: Stack, inference: Any) -> None:
    assert (await inference.ServerLive(oip.ServerLiveRequest())).live
    assert (await inference.ServerReady(oip.ServerReadyRequest())).ready
    for name, version, ready in (("m", "", True), ("m", "1", True), ("m", "2", False), ("other", "", False)):
        assert (await inference.ModelReady(oip.ModelReadyRequest(name=name, version=version))).ready is ready
    server = await inference.ServerMetadata(oip.ServerMetadataRequest())
    assert (server.name, server.version) == ("quire", quire.__version__)
    model = await inference.ModelMetadata(oip.ModelMetadataRequest(name="m"))
    assert (model.name, list(model.versions)) == ("m", ["1"])
    assert {tensor.name: tensor.datatype for tensor in model.inputs}["text_input"] == "BYTES"
    assert next(tensor.name for tensor in model.outputs) == "text_output"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await inference.ModelMetadata(oip.ModelMetadataRequest(name="other"))
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND


async def test_an_answer_follows_its_prompt_unless_told_otherwise(stack: Stack, inference: Any) -> None:
    for number, without in enumerate((False, True), start=1):
        extra = {"exclude_input_in_output": True} if without else {}
        parameters = {"temperature": oip.InferParameter(string_param="0.5"), "n": oip.InferParameter(int64_param=2)}
        request = asked(parameters=parameters, return_finish_reason=True, return_num_output_tokens=True, **extra)
        call = asyncio.ensure_future(inference.ModelInfer(request))
        submit = await stack.scheduler.heard(stack.scheduler.submits, number)
        assert (submit.request_id, list(submit.prompt_token_ids)) == ("r-1", [BOS_ID, *b"hi"])
        assert (submit.sampling.temperature, submit.choice_count, submit.stop.max_tokens) == (0.5, 2, 16)
        await stack.scheduler.started(submit)
        await stack.scheduler.tokens(submit, b" you", end=LENGTH)
        await stack.scheduler.tokens(submit, [*b"!", EOS_ID], choice=1, end=STOP)
        answer = await call
        assert (answer.model_name, answer.model_version, answer.id) == ("m", "1", "r-1")
        assert texts(answer) == ([" you", "!"] if without else ["hi you", "hi!"])
        assert texts(answer, "finish_reason") == ["length", "stop"]
        assert struct.unpack("<2I", answer.raw_output_contents[2]) == (4, 2)


async def test_contents_may_have_their_types(stack: Stack, inference: Any) -> None:
    request = oip.ModelInferRequest(model_name="m", outputs=[{"name": "num_input_tokens"}])
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1, 1], contents={"bytes_contents": [b"hi"]})
    request.inputs.add(name="stream", datatype="BOOL", shape=[1], contents={"bool_contents": [False]})
    call = asyncio.ensure_future(inference.ModelInfer(request))
    submit = await stack.scheduler.heard(stack.scheduler.submits)
    await stack.scheduler.started(submit)
    await stack.scheduler.tokens(submit, b"x", end=LENGTH)
    answer = await call
    assert [(tensor.name, tensor.datatype) for tensor in answer.outputs] == [("num_input_tokens", "UINT32")]
    assert list(answer.raw_output_contents) == [struct.pack("<I", 3)]


async def test_a_stream_answers_in_pieces_side_by_side(stack: Stack, inference: Any) -> None:
    stream = Stream(inference)
    final = {"triton_enable_empty_final_response": oip.InferParameter(bool_param=True)}
    first, second = asked("one", stream=True, parameters=final), asked("two", stream=True)
    second.id = "r-2"
    stream.send(first)
    one = await stack.scheduler.heard(stack.scheduler.submits)
    stream.send(second)
    two = await stack.scheduler.heard(stack.scheduler.submits, 2)
    for submit, output in ((one, b"He"), (two, b"Yo"), (one, b"y")):
        await stack.scheduler.started(submit)
        more = {"position": 2, "end": LENGTH} if output == b"y" else {}
        await stack.scheduler.tokens(submit, output, **more)
        response = (await anext(stream.messages)).infer_response
        assert (response.id, texts(response)) == (submit.request_id, [output.decode()])
        if submit is one:
            assert response.parameters["triton_final_response"].bool_param is (output == b"y")
        else:
            assert not response.parameters
    stream.send(None)
    await stack.scheduler.tokens(two, b"!", position=2, end=LENGTH)
    assert [texts(message.infer_response) for message in [one async for one in stream.messages]] == [["!"]]


async def test_a_failure_does_not_end_the_stream(stack: Stack, inference: Any) -> None:
    stream = Stream(inference)
    stream.send(asked(temperature=True))
    refused = await anext(stream.messages)
    assert "temperature" in refused.error_message
    assert refused.infer_response.id == "r-1"
    stream.send(asked("fails", stream=True))
    submit = await stack.scheduler.heard(stack.scheduler.submits)
    await stack.scheduler.started(submit)  # what has begun is not tried again
    await stack.scheduler.fail(submit, Reason.EXECUTOR_LOST)
    assert (await anext(stream.messages)).error_message == "it broke"
    stream.send(asked("whole"))
    submit = await stack.scheduler.heard(stack.scheduler.submits, 2)
    await stack.scheduler.started(submit)
    await stack.scheduler.tokens(submit, b"!", end=LENGTH)
    assert texts((await anext(stream.messages)).infer_response) == ["whole!"]
    stream.send(None)
    assert [message async for message in stream.messages] == []


async def test_a_stream_that_is_cancelled_ends_its_requests(stack: Stack, inference: Any) -> None:
    stream = Stream(inference)
    stream.send(asked(stream=True))
    submit = await stack.scheduler.heard(stack.scheduler.submits)
    stream.call.cancel()
    assert await stack.scheduler.heard(stack.scheduler.cancels) == submit.handle


async def test_a_time_limit_ends_a_request(stack: Stack, inference: Any) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await inference.ModelInfer(asked(parameters={"timeout": oip.InferParameter(int64_param=200_000)}))
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    submit = await stack.scheduler.heard(stack.scheduler.submits)
    assert 0 < submit.deadline_ms <= 200


async def test_sampling_parameters_are_those_of_a_completion(stack: Stack, inference: Any) -> None:
    sampling = '{"max_tokens": 5, "stop": ["x", "y"], "top_p": "0.5", "guided_choice": ["a", "b"], "seed": 3}'
    call = asyncio.ensure_future(inference.ModelInfer(asked(sampling_parameters=sampling)))
    submit = await stack.scheduler.heard(stack.scheduler.submits)
    assert (submit.stop.max_tokens, list(submit.stop.stop), submit.sampling.top_p) == (5, ["x", "y"], 0.5)
    assert (list(submit.constraint.choice.values), submit.sampling.seed) == (["a", "b"], 3)
    call.cancel()


def changed(**fields: Any) -> oip.ModelInferRequest:
    request = asked()
    request.MergeFrom(oip.ModelInferRequest(**fields))
    return request


def wrong(name: str, datatype: str = "BYTES", shape: tuple[int, ...] = (1,), raw: bytes = packed("x")) -> Any:
    request = asked()
    request.inputs.add(name=name, datatype=datatype, shape=shape)
    request.raw_input_contents.append(raw)
    return request


def parameter(name: str, **value: Any) -> oip.ModelInferRequest:
    return asked(parameters={name: oip.InferParameter(**value)})


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (oip.ModelInferRequest(model_name="m"), "text_input"),
        (changed(model_version="2"), "model_version"),
        (changed(raw_input_contents=[b"x"]), "raw_input_contents"),
        (changed(outputs=[{"name": "logits"}]), "outputs[0].name"),
        (wrong("image"), "inputs[1].name"),
        (wrong("text_input"), "text_input"),
        (wrong("stream", raw=b"\1"), "stream"),
        (wrong("stream", "BOOL", raw=b"\2"), "stream"),
        (wrong("stream", "BOOL", raw=b""), "stream"),
        (wrong("stream", "BOOL", raw=b"\1"), "stream"),
        (wrong("sampling_parameters", shape=(2,)), "sampling_parameters"),
        (wrong("sampling_parameters", raw=b"\1\0"), "sampling_parameters"),
        (wrong("sampling_parameters", raw=packed("x") + packed("y")), "sampling_parameters"),
        (wrong("sampling_parameters", raw=packed(b"\xff")), "sampling_parameters"),
        (wrong("sampling_parameters", raw=packed("[1]")), "sampling_parameters"),
        (wrong("sampling_parameters", raw=packed("{")), "sampling_parameters"),
        (asked(sampling_parameters="{}", parameters={"top_k": oip.InferParameter(int64_param=1)}), "parameters.top_k"),
        (parameter("warmth", int64_param=1), "warmth"),
        (parameter("temperature", string_param="hot"), "temperature"),
        (parameter("temperature", double_param=-1), "temperature"),
        (parameter("max_tokens", int64_param=0), "max_tokens"),
        (parameter("max_tokens"), "parameters.max_tokens"),
        (parameter("n", int64_param=65), "n"),
        (parameter("prompt", string_param="x"), "parameters.prompt"),
        (parameter("logprobs", int64_param=1), "parameters.logprobs"),
        (parameter("priority", uint64_param=1), "parameters.priority"),
        (parameter("timeout", int64_param=0), "parameters.timeout"),
        (parameter("guided_regex", string_param="[a"), "guided_regex"),
        (asked("", parameters={"max_tokens": oip.InferParameter(int64_param=10**6)}), "max_tokens"),
        (changed(id="é"), "id"),
    ],
)
async def test_bad_fields_are_named(stack: Stack, inference: Any, request_: oip.ModelInferRequest, field: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await inference.ModelInfer(request_)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT, caught.value.details()
    assert (caught.value.details() or "").startswith(f"{field}:"), caught.value.details()
    assert not stack.scheduler.submits


async def test_a_stream_cannot_begin_with_its_prompt(stack: Stack, inference: Any) -> None:
    stream = Stream(inference)
    stream.send(asked(stream=True, exclude_input_in_output=False))
    assert (await anext(stream.messages)).error_message.startswith("exclude_input_in_output:")
    stream.send(None)
