"""Who may call what over gRPC, and what the scheduler is told of the caller."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from quire.client import Client, ClientError
from quire.v1 import admin_pb2, gateway_pb2, scheduler_pb2
from services.gateway.caller import Scope
from services.gateway.main import open_keys
from services.gateway.settings import GatewaySettings
from tests.contract.gateway.conftest import Stack, eventually, running
from tests.contract.gateway.fake_scheduler import LENGTH, FakeScheduler
from tests.contract.gateway.keys import ACME, BLUE, METRICS, OPERATOR, WRONG, write_keys
from tests.contract.gateway.test_generate import asked, reason_of

OPEN = {"grpc.health.v1.Health"}
OF_SCOPE = {
    "quire.v1.InferenceService": {Scope.INFER},
    "quire.v1.AdminService": {Scope.ADMIN},
    "inference.GRPCInferenceService": {Scope.INFER},
    "vllm.grpc.engine.VllmEngine": {Scope.INFER},
    "vllm.grpc.engine.VllmEngine.SubscribeKvEvents": {Scope.ADMIN},
    "grpc.reflection.v1alpha.ServerReflection": set(Scope),
}
"""By service, and by method where one needs another."""
ANSWERS = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED}
"""To an empty request that was let in, where there is none."""


def key(text: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {text}"),)


@pytest.fixture
async def locked(tmp_path: Path, scheduler: FakeScheduler) -> AsyncIterator[Stack]:
    """A gateway with keys."""
    async with running(tmp_path, scheduler, keys=write_keys(tmp_path)) as made:
        await eventually(lambda: made.engine.ready)
        yield made


async def call(stack: Stack, method: Any, metadata: tuple[tuple[str, str], ...]) -> grpc.aio.AioRpcError | None:
    """What an empty request to a method ends with."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    kinds = {
        (False, False): stack.channel.unary_unary,
        (False, True): stack.channel.unary_stream,
        (True, False): stack.channel.stream_unary,
        (True, True): stack.channel.stream_stream,
    }
    make: Any = kinds[method.client_streaming, method.server_streaming]
    try:
        made = make(path)(iter([b""]) if method.client_streaming else b"", metadata=metadata, timeout=30)
        await (made.read() if method.server_streaming else made)
        made.cancel()
    except grpc.aio.AioRpcError as error:
        return error
    return None


async def served_methods(stack: Stack) -> list[Any]:
    """Every method that the server tells of by reflection."""

    async def ask(**request: str) -> reflection_pb2.ServerReflectionResponse:
        stub = reflection_pb2_grpc.ServerReflectionStub(stack.channel)
        sent = iter([reflection_pb2.ServerReflectionRequest(**request)])
        [answer] = [one async for one in stub.ServerReflectionInfo(sent, metadata=key(METRICS))]
        return answer

    pool, known = descriptor_pool.DescriptorPool(), set[str]()

    async def learn(**request: str) -> None:
        """Adds a file behind those that it depends on."""
        [first, *_] = (await ask(**request)).file_descriptor_response.file_descriptor_proto
        file = descriptor_pb2.FileDescriptorProto.FromString(first)
        if file.name not in known:
            known.add(file.name)
            for needed in file.dependency:
                await learn(file_by_filename=needed)
            pool.Add(file)

    names = [service.name for service in (await ask(list_services="")).list_services_response.service]
    for name in names:
        await learn(file_containing_symbol=name)
    return [method for name in names for method in pool.FindServiceByName(name).methods]


async def test_every_method_but_health_needs_a_known_key(locked: Stack) -> None:
    """S3: and nothing else than a known key will do. What there is, reflection says."""
    methods = await served_methods(locked)
    services = {method.containing_service.full_name for method in methods}
    assert services == OPEN | {name for name in OF_SCOPE if not name.endswith("SubscribeKvEvents")}
    for method in methods:
        if method.containing_service.full_name in OPEN:
            opened = await call(locked, method, ())
            assert opened is None or opened.code() == grpc.StatusCode.UNIMPLEMENTED
            continue
        for value in WRONG:
            error = await call(locked, method, () if value is None else (("authorization", value),))
            assert error is not None, (method.full_name, value)
            assert reason_of(error) == "UNAUTHENTICATED", (method.full_name, value)
            assert error.code() == grpc.StatusCode.UNAUTHENTICATED
            assert ACME not in (error.details() or "")
        twice = await call(locked, method, key(ACME) + key(BLUE))
        assert twice is not None
        assert twice.code() == grpc.StatusCode.UNAUTHENTICATED
    assert not locked.scheduler.submits


async def test_every_method_needs_its_scope(locked: Stack) -> None:
    scopes = {ACME: {Scope.INFER}, OPERATOR: {Scope.INFER, Scope.ADMIN}, METRICS: {Scope.METRICS}}
    for method in await served_methods(locked):
        if (service := method.containing_service.full_name) in OPEN:
            continue
        for text, has in scopes.items():
            error = await call(locked, method, key(text))
            if has & OF_SCOPE.get(method.full_name, OF_SCOPE[service]):
                assert error is None or error.code() in ANSWERS
            else:
                assert error is not None, method.full_name
                assert reason_of(error) == "PERMISSION_DENIED"


async def test_what_the_guard_does_not_know_needs_an_operator(locked: Stack) -> None:
    for text, code in ((None, "UNAUTHENTICATED"), (ACME, "PERMISSION_DENIED"), (OPERATOR, "UNIMPLEMENTED")):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await locked.channel.unary_unary("/some.new.Service/Do")(b"", metadata=key(text) if text else ())
        assert caught.value.code().name == code


async def test_the_scheduler_learns_who_asks_and_what_they_aim_at(locked: Stack) -> None:
    """Kind 14: the tenant is the key's, whatever else a client sends."""
    foreign = (("x-llm-d-inference-fairness-id", "blue"), ("tenant", "blue"))
    request = asked(priority=7, target_first_token_ms=60_000, target_token_gap_ms=40)
    stream = locked.inference.GenerateStream(request, metadata=key(ACME) + foreign, timeout=30)
    first = await locked.scheduler.heard(locked.scheduler.submits)
    assert (first.tenant, first.tenant_weight, first.priority) == ("acme", 2.5, 7)
    assert 0 < first.deadline_ms <= 31_000  # gRPC rounds up
    assert 0 < first.target_first_token_ms <= 60_000
    assert first.target_token_gap_ms == 40
    other = locked.inference.GenerateStream(asked(priority=-5), metadata=key(BLUE))
    second = await locked.scheduler.heard(locked.scheduler.submits, 2)
    assert (second.tenant, second.tenant_weight, second.priority) == ("blue", 1.0, -5)
    assert (second.deadline_ms, second.target_first_token_ms, second.target_token_gap_ms) == (0, 0, 0)
    stream.cancel()
    other.cancel()


async def test_without_keys_all_are_one_tenant_that_may_everything(stack: Stack) -> None:
    call = stack.inference.GenerateStream(asked(priority=100), metadata=key("whatever"))
    submit = await stack.scheduler.heard(stack.scheduler.submits)
    assert (submit.tenant, submit.tenant_weight, submit.priority) == ("default", 1.0, 100)
    await stack.admin.GetStatus(admin_pb2.GetStatusRequest())
    call.cancel()


@pytest.mark.parametrize(("text", "priority", "highest"), [(ACME, 8, 7), (BLUE, 1, 0)])
async def test_a_priority_above_the_tenant_s_is_refused(locked: Stack, text: str, priority: int, highest: int) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match=f"priority: {priority} is above {highest}") as caught:
        await locked.inference.GenerateStream(asked(priority=priority), metadata=key(text)).read()
    assert reason_of(caught.value) == "PERMISSION_DENIED"
    assert not locked.scheduler.submits


@pytest.mark.parametrize("field", ["target_first_token_ms", "target_token_gap_ms"])
@pytest.mark.parametrize("value", [-1, 10**9 + 1])
async def test_impossible_targets_are_named(stack: Stack, field: str, value: int) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match=field) as caught:
        await stack.inference.GenerateStream(asked(**{field: value})).read()
    assert reason_of(caught.value) == "INVALID_FIELD"


async def test_request_ids_of_tenants_never_meet(locked: Stack) -> None:
    """Kind 14: the same id runs once per tenant, and only its own tenant learns that it does."""
    calls = [locked.inference.GenerateStream(asked(request_id="r"), metadata=key(text)) for text in (ACME, BLUE)]
    await locked.scheduler.heard(locked.scheduler.submits, 2)
    assert {(one.tenant, one.request_id) for one in locked.scheduler.submits} == {("acme", "r"), ("blue", "r")}
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await locked.inference.GenerateStream(asked("other", request_id="r"), metadata=key(OPERATOR)).read()
    assert reason_of(caught.value) == "ALREADY_EXISTS"
    texts = []
    for submit, text in zip(locked.scheduler.submits, (b"one", b"two"), strict=True):
        await locked.scheduler.started(submit)
        await locked.scheduler.tokens(submit, text, end=LENGTH)
    for one in calls:
        messages = [message async for message in one]
        assert {message.request_id for message in messages} == {"r"}
        texts.append("".join(message.text for message in messages))
    by_tenant = {one.tenant: text for one, text in zip(locked.scheduler.submits, ("one", "two"), strict=True)}
    assert texts == [by_tenant["acme"], by_tenant["blue"]]


async def test_a_key_that_is_taken_away_opens_nothing_more(locked: Stack) -> None:
    """A running answer goes on; the next call is refused."""
    call = locked.inference.GenerateStream(asked(), metadata=key(BLUE))
    submit = await locked.scheduler.heard(locked.scheduler.submits)
    path = locked.engine.settings.keys
    assert path is not None
    path.write_text(path.read_text().partition('[[keys]]\ntenant = "blue"')[0] + "# blue is gone\n")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await locked.inference.ListModels(gateway_pb2.ListModelsRequest(), metadata=key(BLUE))
    assert reason_of(caught.value) == "UNAUTHENTICATED"
    await locked.scheduler.started(submit)
    await locked.scheduler.tokens(submit, b"still", end=LENGTH)
    assert "".join([message.text async for message in call]) == "still"


async def test_the_client_shows_its_key(locked: Stack) -> None:
    target = locked.engine.settings.listen

    def talk() -> None:
        with Client(target) as stranger, pytest.raises(ClientError) as caught:
            stranger.models()
        assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED")
        with Client(target, api_key=BLUE) as client:
            assert [model.name for model in client.models()] == ["m"]
            with pytest.raises(ClientError) as caught:
                client.status()
            assert caught.value.reason == "PERMISSION_DENIED"
            pieces = client.stream("hi", target_first_token_ms=500, target_token_gap_ms=20, priority=0)
            assert "".join(piece.text for piece in pieces) == "ok"
        with Client(target, api_key=OPERATOR) as client:
            assert client.status().open_request_count == 0
        with pytest.raises(ValueError, match="api_key"):
            Client(target, api_key="two\nlines")

    async def answer() -> scheduler_pb2.Submit:
        submit: scheduler_pb2.Submit = await locked.scheduler.heard(locked.scheduler.submits)
        await locked.scheduler.started(submit)
        await locked.scheduler.tokens(submit, b"ok", end=LENGTH)
        return submit

    submit, _ = await asyncio.gather(answer(), asyncio.to_thread(talk))
    assert (submit.tenant, submit.target_token_gap_ms) == ("blue", 20)


def test_a_bad_file_of_keys_ends_the_start(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text("[[keys]]")
    settings = GatewaySettings.model_validate({"keys": path})
    with pytest.raises(SystemExit, match=rf"keys: {path}: keys\[0\]\.tenant"):
        open_keys(settings, None)
