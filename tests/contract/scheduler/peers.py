"""A scheduler's peers over real streams: simulated executors, the real kvmanager, and a gateway's end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
from prometheus_client import CollectorRegistry

from quire.v1 import (
    executor_pb2,
    executor_pb2_grpc,
    kvmanager_pb2_grpc,
    scheduler_pb2,
    scheduler_pb2_grpc,
    types_pb2,
)
from services.common.errors import ErrorInterceptor, QuireError, Reason
from services.common.rpc import Server
from services.kvmanager import messages
from services.kvmanager.manager import KvManager
from services.kvmanager.servicer import KvManagerServicer
from services.scheduler.loop import SchedulerLoop
from services.scheduler.servicer import SchedulerServicer
from services.scheduler.settings import SchedulerSettings
from tests.unit.scheduler.sim import Client
from tests.unit.scheduler.sim_executor import SimExecutor

BUNDLE = b"bundle" * 1000


class FakeExecutor(executor_pb2_grpc.ExecutorServiceServicer):
    """Serves a simulated executor, which may freeze, break its stream, or change its model."""

    def __init__(self, world: World, target: str, description: types_pb2.ExecutorDescription) -> None:
        self.world, self.target = world, target
        self.sim = SimExecutor(description)
        self.frozen = False
        self.opens = asyncio.Event()  # what opens a stream waits for this
        self.opens.set()
        self.step_seconds = 0.0005
        self.hellos: list[executor_pb2.RunHello] = []
        self._arrived = asyncio.Event()
        self._outgoing: asyncio.Queue[executor_pb2.RunResponse | QuireError] = asyncio.Queue()
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        self._server = grpc.aio.server(interceptors=[ErrorInterceptor()])
        executor_pb2_grpc.add_ExecutorServiceServicer_to_server(self, self._server)
        self._server.add_insecure_port(self.target)
        await self._server.start()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(0)
            self._server = None

    def break_stream(self, error: QuireError) -> None:
        self._outgoing.put_nowait(error)

    def drain(self, seconds: float) -> None:
        """Says that it ends by then, as a real one does upon a signal."""
        drain = executor_pb2.RunDrain(remaining_seconds=seconds)
        self._outgoing.put_nowait(executor_pb2.RunResponse(drain=drain))

    def set_model(self, description: types_pb2.ExecutorDescription) -> None:
        """Another model, or none: a new pool and a word on the stream, as a real executor gives it."""
        epoch = self.sim.epoch
        self.sim = SimExecutor(description)
        self.sim.epoch = epoch
        self.world.register(self.sim)
        self._outgoing.put_nowait(executor_pb2.RunResponse(description=description))

    async def Run(self, request_iterator: AsyncIterator[executor_pb2.RunRequest], context: Any) -> Any:
        first = await anext(request_iterator)
        await self.opens.wait()
        self.hellos.append(first.hello)
        self._outgoing = outgoing = asyncio.Queue()
        epoch = self.sim.reset()
        self.world.register(self.sim)
        yield executor_pb2.RunResponse(welcome=executor_pb2.RunWelcome(epoch=epoch, description=self.sim.description))
        tasks = [asyncio.create_task(self._read(request_iterator, outgoing)), asyncio.create_task(self._step(outgoing))]
        try:
            while True:
                message = await outgoing.get()
                if isinstance(message, QuireError):
                    raise message
                yield message
        finally:
            for task in tasks:
                task.cancel()

    async def _read(self, requests: AsyncIterator[executor_pb2.RunRequest], outgoing: asyncio.Queue[Any]) -> None:
        async for request in requests:
            try:
                self.sim.take(request.plan)
            except QuireError as error:
                outgoing.put_nowait(error)
            self._arrived.set()

    async def _step(self, outgoing: asyncio.Queue[Any]) -> None:
        while True:
            message = None if self.frozen else self.sim.run()
            if message is not None:
                outgoing.put_nowait(executor_pb2.RunResponse(results=message))
            if self.frozen or not any(s.credit for s in self.sim.sequences.values()):
                self._arrived.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._arrived.wait(), 0.05 if self.frozen else None)
            await asyncio.sleep(self.step_seconds)

    async def Describe(self, request: Any, context: Any) -> executor_pb2.DescribeResponse:
        return executor_pb2.DescribeResponse(description=self.sim.description, epoch=self.sim.epoch)

    async def FetchTokenizer(self, request: executor_pb2.FetchTokenizerRequest, context: Any) -> Any:
        if request.tokenizer_fingerprint != self.sim.description.model.tokenizer_fingerprint:
            raise QuireError(Reason.NOT_FOUND, "no such tokenizer")
        for start in range(0, len(BUNDLE), 1024):
            yield executor_pb2.FetchTokenizerResponse(data=BUNDLE[start : start + 1024])

    async def LoadModel(self, request: executor_pb2.LoadModelRequest, context: Any) -> executor_pb2.LoadModelResponse:
        if request.source == "broken":
            raise QuireError(Reason.MODEL_LOAD_FAILED, "broken: no weights")
        description = types_pb2.ExecutorDescription()
        description.CopyFrom(self.world.template)
        description.executor_id = self.sim.description.executor_id
        description.model.name, description.model.fingerprint = request.name, f"weights of {request.source}"
        description.model.source = request.source
        self.set_model(description)
        return executor_pb2.LoadModelResponse(description=description)

    async def UnloadModel(self, request: Any, context: Any) -> executor_pb2.UnloadModelResponse:
        description = types_pb2.ExecutorDescription()
        description.CopyFrom(self.sim.description)
        description.ClearField("model")
        self.set_model(description)
        return executor_pb2.UnloadModelResponse(description=description)


class GatewayEnd:
    """A gateway's stream and what its requests saw."""

    def __init__(self, stub: Any, gateway_id: str = "g1") -> None:
        self.clients: dict[int, Client] = {}
        self.models: list[types_pb2.ModelDescription] = []
        self.messages: list[scheduler_pb2.ServeResponse] = []
        self.call = stub.Serve()
        self._gateway_id = gateway_id
        self.reading: asyncio.Task[None] | None = None

    async def open(self) -> GatewayEnd:
        await self.call.write(scheduler_pb2.ServeRequest(gateway_id=self._gateway_id))
        self.reading = asyncio.create_task(self._read())
        return self

    async def close(self) -> None:
        self.call.cancel()
        if self.reading is not None:
            self.reading.cancel()
            await asyncio.wait({self.reading})

    async def submit(self, *submits: scheduler_pb2.Submit) -> None:
        for submit in submits:
            known = {p.choice: list(p.token_ids) for p in submit.progress}
            self.clients[submit.handle] = Client(submit, {c: known.get(c, []) for c in range(submit.choice_count)})
        await self.call.write(scheduler_pb2.ServeRequest(submits=submits))

    async def send(self, **parts: Any) -> None:
        await self.call.write(scheduler_pb2.ServeRequest(**parts))

    async def done(self, *handles: int, seconds: float = 30.0) -> None:
        await until(lambda: all(self.clients[h].done for h in handles), seconds)

    async def _read(self) -> None:
        async for message in self.call:
            self.messages.append(message)
            if message.models_changed:
                self.models = list(message.models)
            for started in message.started:
                self.clients[started.handle].started.append(started)
            at = 0
            for handle, choice, position, count in zip(
                message.handles, message.choices, message.positions, message.token_counts, strict=True
            ):
                output = self.clients[handle].outputs[choice]
                assert position == len(output)
                output += message.token_ids[at : at + count]
                at += count
            for end in message.ended:
                self.clients[end.handle].ends[end.choice] = end


class World:
    """Everything around one scheduler, in one process."""

    def __init__(self, folder: Path, template: types_pb2.ExecutorDescription) -> None:
        self.folder, self.template = folder, template
        self.manager = KvManager(lease_seconds=5.0)
        self.executors: list[FakeExecutor] = []
        self.readiness: list[bool] = []
        self._kv_server: grpc.aio.Server | None = None
        self._kv_servicer: KvManagerServicer | None = None
        self._running: asyncio.Task[None] | None = None
        self._gateways: list[GatewayEnd] = []

    def target(self, name: str) -> str:
        return f"unix:{self.folder}/{name}"

    def register(self, sim: SimExecutor) -> None:
        """What an executor tells the kvmanager; here without a stream."""
        spec = messages.read_description(sim.description)
        known = self.manager.executors.get(spec.executor_id)
        if known is None or known.spec != spec:
            self.manager.replace(spec, epoch=sim.epoch).settle([])
        else:
            self.manager.report(spec.executor_id, sim.epoch, [sim.epoch - 1])

    async def start_kvmanager(self) -> None:
        self._kv_server = grpc.aio.server(interceptors=[ErrorInterceptor()])
        self._kv_servicer = KvManagerServicer(self.manager)
        kvmanager_pb2_grpc.add_KvManagerServiceServicer_to_server(self._kv_servicer, self._kv_server)
        self._kv_server.add_insecure_port(self.target("kv"))
        await self._kv_server.start()

    async def stop_kvmanager(self) -> None:
        if self._kv_server is not None and self._kv_servicer is not None:
            await self._kv_servicer.close()
            await self._kv_server.stop(0)
            self._kv_server = None

    async def lose_kvmanager(self) -> None:
        """A new, empty kvmanager takes the old one's place; executors register there by themselves."""
        await self.stop_kvmanager()
        self.manager = KvManager(lease_seconds=5.0)
        for executor in self.executors:
            self.register(executor.sim)
        await self.start_kvmanager()

    async def start_executor(self, description: types_pb2.ExecutorDescription) -> FakeExecutor:
        executor = FakeExecutor(self, self.target(f"e{len(self.executors)}"), description)
        self.executors.append(executor)
        await executor.start()
        return executor

    async def start_scheduler(self, count: int = 1, **settings: Any) -> None:
        made = SchedulerSettings(
            listen=self.target("scheduler"),
            metrics_listen="",
            kvmanager=self.target("kv"),
            executors=tuple(self.target(f"e{i}") for i in range(count)),
            **settings,
        )
        services = [scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"]]
        self.server = Server(made, services, CollectorRegistry())

        async def on_ready(ready: bool) -> None:
            self.readiness.append(ready)
            await self.server.set_ready(ready)

        self.loop = SchedulerLoop(made, on_ready)
        scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(SchedulerServicer(self.loop), self.server.grpc)
        await self.server.start()
        self._running = asyncio.create_task(self.loop.run())
        self.channel = grpc.aio.insecure_channel(self.target("scheduler"))
        self.stub: scheduler_pb2_grpc.SchedulerServiceAsyncStub = scheduler_pb2_grpc.SchedulerServiceStub(self.channel)

    async def gateway(self, gateway_id: str = "g1") -> GatewayEnd:
        gateway = await GatewayEnd(self.stub, gateway_id).open()
        self._gateways.append(gateway)
        return gateway

    async def ready(self) -> None:
        await until(lambda: self.server.ready)

    async def assert_no_blocks_held(self) -> None:
        await until(lambda: self.manager.sequence_count == 0)
        assert self.manager.verify() == []

    async def close(self) -> None:
        for gateway in self._gateways:
            await gateway.close()
        if self._running is not None:
            await self.channel.close()
            await self.server.grpc.stop(0)
            self._running.cancel()
            await asyncio.wait({self._running})
            if not self._running.cancelled() and (error := self._running.exception()) is not None:
                raise error
        await self.stop_kvmanager()
        for executor in self.executors:
            await executor.stop()


async def until(holds: Callable[[], bool], seconds: float = 30.0) -> None:
    """Waits until a condition holds; fails where it does not."""
    async with asyncio.timeout(seconds):
        while not holds():
            await asyncio.sleep(0.005)
