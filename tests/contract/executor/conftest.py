"""One real gRPC server of the executor, in process, with the fake backend."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import grpc
import pytest
from prometheus_client import CollectorRegistry

from quire.v1 import executor_pb2, executor_pb2_grpc, kvmanager_pb2, kvmanager_pb2_grpc
from services.common.errors import QuireError, Reason
from services.common.rpc import OPTIONS, Server
from services.executor.batch import StepLimits
from services.executor.engine import Engine
from services.executor.kv_link import KvLink
from services.executor.metrics import ExecutorMetrics
from services.executor.servicer import ExecutorServicer
from services.executor.settings import ExecutorSettings
from services.executor.watchdog import watch
from tests.unit.executor.fake_backend import FakeBackend, loaded
from tests.unit.executor.plans import plan

SERVICE = "quire.v1.ExecutorService"


class FakeKvManager(kvmanager_pb2_grpc.KvManagerServiceServicer):
    def __init__(self) -> None:
        self.requests: list[kvmanager_pb2.ReportRequest] = []
        self.streams = 0
        self.cut = asyncio.Event()
        self.first_operation_id = 0
        self.asked = 0  # inventories so far

    async def inventory(self) -> dict[int, bytes]:
        """What the executor answers to the last ask, once it does: block to key."""

        def answers() -> list[kvmanager_pb2.ReportRequest]:
            return [request for request in self.requests if self.asked and request.answers == self.asked]

        await eventually(answers)
        return {block.block_id: block.key for block in answers()[0].inventory}

    async def Report(self, request_iterator, context):
        self.streams += 1

        async def read() -> None:
            async for request in request_iterator:
                self.requests.append(request)
                self.asked += request.HasField("description")
                ask = self.asked if request.HasField("description") else 0
                await context.write(kvmanager_pb2.ReportResponse(first_operation_id=self.first_operation_id, ask=ask))

        reading = asyncio.create_task(read())
        await self.cut.wait()
        self.cut.clear()
        reading.cancel()


@dataclass
class Executor:
    """The server under test and ways to talk to it."""

    engine: Engine
    server: Server
    backend: FakeBackend
    kvmanager: FakeKvManager
    channel: grpc.aio.Channel
    stub: executor_pb2_grpc.ExecutorServiceStub
    load_errors: list[QuireError] = field(default_factory=list)


class Stream:
    """A scheduler's side of Run."""

    def __init__(self, call) -> None:
        self.call = call
        self.epoch = 0
        self.step = 0
        self.results: list[executor_pb2.StepResults] = []

    async def plan(self, **fields) -> None:
        self.step += 1
        await self.call.write(executor_pb2.RunRequest(plan=plan(self.epoch, self.step, **fields)))

    async def read(self) -> executor_pb2.RunResponse:
        response = await asyncio.wait_for(self.call.read(), 20)
        assert response is not grpc.aio.EOF
        return response

    async def next_results(self) -> executor_pb2.StepResults:
        response = await self.read()
        assert response.WhichOneof("message") == "results"
        self.results.append(response.results)
        return response.results

    async def until_ended(self, *sequence_ids: int) -> list[executor_pb2.StepResults]:
        """Reads results until all these sequences have ended."""
        left = set(sequence_ids)
        while left:
            left -= {end.sequence_id for end in (await self.next_results()).ended}
        return self.results

    async def status(self) -> tuple[grpc.StatusCode, str]:
        """Reads to the end, and says how it came."""
        with contextlib.suppress(grpc.aio.AioRpcError):
            while await asyncio.wait_for(self.call.read(), 20) is not grpc.aio.EOF:
                pass
        return await self.call.code(), await self.call.details()


async def run(executor: Executor, previous_epoch: int = 0, acknowledged: int = 0) -> Stream:
    stream = Stream(executor.stub.Run())
    hello = executor_pb2.RunHello(scheduler_id="s", previous_epoch=previous_epoch, acknowledged_results=acknowledged)
    await stream.call.write(executor_pb2.RunRequest(hello=hello))
    stream.epoch = (await stream.read()).welcome.epoch
    return stream


async def eventually(check) -> None:
    """Waits until check() holds."""
    async with asyncio.timeout(20):
        while not check():
            await asyncio.sleep(0.01)


@pytest.fixture
async def empty(tmp_path) -> AsyncIterator[Executor]:
    """An executor that holds no model; its kvmanager is a fake one."""
    kvmanager = FakeKvManager()
    kv_server = grpc.aio.server()
    kvmanager_pb2_grpc.add_KvManagerServiceServicer_to_server(kvmanager, kv_server)
    kv_server.add_insecure_port(f"unix:{tmp_path}/kv.sock")
    await kv_server.start()
    settings = ExecutorSettings.model_validate({"listen": f"unix:{tmp_path}/executor.sock", "metrics_listen": ""})
    registry = CollectorRegistry()
    server = Server(settings, [executor_pb2.DESCRIPTOR.services_by_name["ExecutorService"]], registry)
    backend = FakeBackend()
    load_errors: list[QuireError] = []

    def loader(name, source):
        if load_errors:
            raise load_errors.pop()
        if source == "missing":
            raise QuireError(Reason.MODEL_LOAD_FAILED, "missing: no such model")
        return loaded(backend, name or "fake", source)

    engine = Engine(
        StepLimits(sequences=8, tokens=32),
        loader,
        KvLink(lambda: grpc.aio.insecure_channel(f"unix:{tmp_path}/kv.sock")),
        ExecutorMetrics(registry),
        server.set_ready,
    )
    executor_pb2_grpc.add_ExecutorServiceServicer_to_server(ExecutorServicer(engine), server.grpc)
    await server.start()
    engine.start()
    watching = asyncio.create_task(watch(engine, 0.4, server))
    channel = grpc.aio.insecure_channel(f"unix:{tmp_path}/executor.sock", options=OPTIONS)
    yield Executor(
        engine, server, backend, kvmanager, channel, executor_pb2_grpc.ExecutorServiceStub(channel), load_errors
    )
    if backend.gate is not None:
        backend.gate.set()
    watching.cancel()
    await channel.close()
    await engine.stop()
    await server.grpc.stop(0)
    await kv_server.stop(0)


@pytest.fixture
async def executor(empty: Executor) -> Executor:
    """An executor that serves the fake model."""
    await empty.engine.load("fake", "none")
    empty.backend.batches.clear()
    empty.backend.kv[:] = -1
    return empty
