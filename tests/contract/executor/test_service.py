"""Loading, describing, health, reflection, and what the kvmanager hears."""

import asyncio
import threading

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from quire.v1 import executor_pb2
from services.common.errors import QuireError, Reason, from_rpc_error
from tests.contract.executor.conftest import SERVICE, eventually, run
from tests.unit.executor.fake_backend import generate
from tests.unit.executor.plans import state, tokens_by_sequence

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


async def health(executor, name=""):
    stub = health_pb2_grpc.HealthStub(executor.channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(service=name))).status


async def load(executor, name="fake", source="none"):
    return await executor.stub.LoadModel(executor_pb2.LoadModelRequest(name=name, source=source))


async def reason_of(call) -> Reason:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    return from_rpc_error(raised.value, Reason.EXECUTOR_LOST).reason


async def test_k4_serving_only_with_a_warm_model(empty):
    for name in ("", SERVICE):
        assert await health(empty, name) == NOT_SERVING
    assert await health(empty, "liveness") == SERVING
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await health(empty, "quire.v1.Nothing")
    assert raised.value.code() == grpc.StatusCode.NOT_FOUND
    watch = health_pb2_grpc.HealthStub(empty.channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE))
    assert (await watch.read()).status == NOT_SERVING
    await load(empty)
    assert (await watch.read()).status == SERVING
    assert empty.backend.batches  # a real prefill and decodes came first
    await empty.stub.UnloadModel(executor_pb2.UnloadModelRequest())
    assert (await watch.read()).status == NOT_SERVING
    watch.cancel()


async def test_k4_a_failing_model_keeps_it_not_serving(empty):
    assert await reason_of(load(empty, source="missing")) == Reason.MODEL_LOAD_FAILED
    empty.backend.bad_lengths = set(range(300))
    assert await reason_of(load(empty)) == Reason.MODEL_LOAD_FAILED
    assert await health(empty) == NOT_SERVING
    empty.backend.bad_lengths = set()
    await load(empty)
    assert await health(empty) == SERVING


async def test_k1_a_stuck_step_withdraws_health_and_gives_it_back(executor):
    executor.backend.gate = threading.Event()
    stream = await run(executor)
    await stream.plan(enter=[state(1, [1], range(4))], grants=[(1, 32, 9)])
    await eventually(lambda: not executor.server.ready)
    assert await health(executor) == NOT_SERVING
    assert await health(executor, "liveness") == NOT_SERVING
    executor.backend.gate.set()
    await eventually(lambda: executor.server.ready)
    assert await health(executor, "liveness") == SERVING
    assert tokens_by_sequence(await stream.until_ended(1)) == {1: generate([1], 8)}


async def test_description_of_a_loaded_executor(executor):
    response = await executor.stub.Describe(executor_pb2.DescribeRequest())
    description = response.description
    assert (description.model.name, description.model.vocab_size, description.model.context_length) == (
        "fake",
        100,
        256,
    )
    assert list(description.model.eos_token_ids) == [99]
    assert not description.model.HasField("bos_token_id")
    assert (description.groups[0].block_size, description.pools[0].block_count) == (4, 64)
    assert (description.max_sequences, description.max_step_tokens) == (8, 32)
    assert description.decode_step_seconds > 0
    assert description.prefill_tokens_per_second > 0
    assert response.epoch == 0


async def test_empty_executor_describes_itself_and_refuses_sequences(empty):
    response = await empty.stub.Describe(executor_pb2.DescribeRequest())
    assert not response.description.HasField("model")
    assert response.description.executor_id
    stream = await run(empty)
    await stream.plan(enter=[state(1, [1], [])])
    end = (await stream.next_results()).ended[0]
    assert (end.error.reason, end.error.retryable) == ("NO_EXECUTOR", True)


async def test_a_second_model_is_refused(executor):
    assert await reason_of(load(executor)) == Reason.PRECONDITION
    assert await health(executor) == SERVING


async def test_source_must_be_set(empty):
    assert await reason_of(load(empty, source="")) == Reason.INVALID_FIELD


async def test_unloading_nothing_is_refused(empty):
    assert await reason_of(empty.stub.UnloadModel(executor_pb2.UnloadModelRequest())) == Reason.PRECONDITION


async def test_f2_reload_tells_the_stream_and_forgets_blocks(executor):
    stream = await run(executor)
    await stream.plan(
        enter=[state(1, [1, 2], range(4))],
        grants=[(1, 32, 1)],
        sealed=[executor_pb2.SealedBlock(block_id=20, key=bytes(32))],
    )
    await stream.next_results()
    heard, before = executor.kvmanager.requests, executor.engine.description.model.fingerprint
    await executor.stub.UnloadModel(executor_pb2.UnloadModelRequest())
    assert not (await stream.read()).description.HasField("model")
    await load(executor, source="other weights")
    assert (await stream.read()).description.model.fingerprint != before
    assert executor.engine.sequence_count == 0
    await eventually(lambda: any(request.description.model.fingerprint not in ("", before) for request in heard))
    assert await executor.kvmanager.inventory() == {}
    await stream.plan(enter=[state(2, [3], range(4))], grants=[(2, 32, 9)])
    assert tokens_by_sequence(await stream.until_ended(2))[2] == generate([3], 8)


async def test_tokenizer_comes_in_pieces_by_fingerprint(executor):
    held = executor.engine.model
    request = executor_pb2.FetchTokenizerRequest(tokenizer_fingerprint=held.tokenizer_fingerprint)
    pieces = [piece.data async for piece in executor.stub.FetchTokenizer(request)]
    assert b"".join(pieces) == held.tokenizer_bundle
    assert len(pieces) == 2
    other = executor.stub.FetchTokenizer(executor_pb2.FetchTokenizerRequest(tokenizer_fingerprint="00"))
    assert await reason_of(other.read()) == Reason.NOT_FOUND


async def test_reflection_lists_the_service(executor):
    stub = reflection_pb2_grpc.ServerReflectionStub(executor.channel)
    call = stub.ServerReflectionInfo()
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    names = {service.name for service in (await call.read()).list_services_response.service}
    assert {SERVICE, "grpc.health.v1.Health"} <= names
    await call.done_writing()


async def test_the_kvmanager_hears_of_model_epochs_and_operations(executor):
    heard = executor.kvmanager.requests
    await eventually(lambda: any(request.description.HasField("model") for request in heard))
    first, second = await run(executor), await run(executor)
    await eventually(lambda: heard[-1].epoch == 2)
    assert 1 in [epoch for request in heard for epoch in request.closed_epochs]
    copy = executor_pb2.BlockOperation(
        operation_id=7,
        kind=executor_pb2.BLOCK_OPERATION_KIND_COPY,
        phase=executor_pb2.BLOCK_OPERATION_PHASE_BEFORE,
        source_block_id=0,
        destination_block_id=1,
    )
    await second.plan(operations=[copy], enter=[state(1, [1], range(4))], grants=[(1, 32, 9)])
    await second.until_ended(1)
    await eventually(lambda: 7 in [i for request in heard for i in request.done_operation_ids])
    await eventually(lambda: heard[-1].last_step == 8)
    assert first.epoch == 1


async def test_the_kvmanager_gets_everything_again_when_it_returns(executor):
    stream = await run(executor)
    await stream.plan(
        enter=[state(1, [1], range(4))],
        grants=[(1, 32, 9)],
        sealed=[executor_pb2.SealedBlock(block_id=20, key=b"k" * 32)],
    )
    await stream.until_ended(1)
    heard = executor.kvmanager.requests
    streams, seen = executor.kvmanager.streams, len(heard)
    executor.kvmanager.cut.set()
    await eventually(lambda: executor.kvmanager.streams > streams and len(heard) > seen)
    again = heard[seen]
    assert again.description.HasField("model")
    assert again.epoch == 1
    assert await executor.kvmanager.inventory() == {20: b"k" * 32}


async def test_what_the_kvmanager_must_know_does_not_go_to_a_stream_that_broke(executor):
    await run(executor)
    heard, streams = executor.kvmanager.requests, executor.kvmanager.streams
    await eventually(lambda: heard and heard[-1].epoch == 1)
    executor.kvmanager.cut.set()
    await eventually(lambda: executor.kvmanager.streams > streams and heard[-1].answers)
    seen = len(heard)
    await run(executor)
    await eventually(lambda: 1 in [epoch for request in heard[seen:] for epoch in request.closed_epochs])


async def test_a_load_under_way_refuses_another(empty, monkeypatch):
    gate = threading.Event()
    loader = empty.engine._loader
    monkeypatch.setattr(empty.engine, "_loader", lambda name, source: gate.wait(20) and loader(name, source))
    loading = asyncio.ensure_future(empty.engine.load("a", "none"))
    await asyncio.sleep(0.05)
    with pytest.raises(QuireError, match="being loaded"):
        await empty.engine.load("b", "none")
    gate.set()
    await loading
    assert empty.engine.description.model.name == "a"
