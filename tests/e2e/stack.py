"""The four services as real processes on free ports, for end-to-end tests.

    with Stack(folder, kv_blocks=64, scheduler={"step_tokens": 64}) as stack:
        channel = grpc.aio.insecure_channel(stack.gateway)
        stack.kill("executor")
        stack.start("executor")
        stack.wait_ready()

Inside an async test, `async with Stack(...)` and `await asyncio.to_thread(stack.wait_ready)` keep the loop free.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quire.supervisor.layout import SUPERVISOR_PID
from quire.v1 import scheduler_pb2_grpc, scheduler_status_pb2

READY_SECONDS = 120.0  # longer than a busy machine takes to start four processes
HOST = "127.0.0.1"
Settings = Mapping[str, object]
# Below those that systems give to whoever asks for any or connects: else another process may get a port before the
# service that is to listen on it, or while that one is restarted.
PORTS = range(12_000, 20_000)
_PORTS = itertools.cycle(random.SystemRandom().sample(PORTS, len(PORTS)))


def free_port() -> int:
    """A port that nobody listens on now, and that this process was not given lately."""
    for port in itertools.islice(_PORTS, len(PORTS)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((HOST, port))
            return port
    raise AssertionError("no port is free")


def is_serving(target: str, service: str = "", seconds: float = 1.0) -> bool:
    """Whether a gRPC health check answers SERVING."""
    with grpc.insecure_channel(target) as channel:
        try:
            request = health_pb2.HealthCheckRequest(service=service)
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=seconds)
        except grpc.RpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def connected_executors(scheduler: str) -> int:
    """How many executors a scheduler has a stream to."""
    with grpc.insecure_channel(scheduler) as channel:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        status = stub.GetSchedulerStatus(scheduler_status_pb2.GetSchedulerStatusRequest(), timeout=10)
    return sum(executor.connected for executor in status.executors)


class Service:
    """One process, over its lives. Its port and settings stay."""

    def __init__(self, role: str, settings: Settings, log: Path, *, health_service: str = "") -> None:
        self.role, self.log_path, self.health_service = role, log, health_service
        self.target = f"{HOST}:{free_port()}"
        self.metrics = f"{HOST}:{free_port()}"
        self.settings = {"listen": self.target, "metrics_listen": self.metrics, **settings}
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts the process; the log goes on."""
        arguments = [f"--{name.replace('_', '-')}={value}" for name, value in self.settings.items()]
        # Dies with the test run, however that ends.
        environment = {**os.environ, "OMP_NUM_THREADS": "1", SUPERVISOR_PID: str(os.getpid())}
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "quire.cli", "serve", self.role, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
            )

    def end(self, number: signal.Signals, seconds: float) -> int:
        """Signals the process and returns its exit status, negative for a signal's."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(seconds)


class Stack:
    """A kvmanager, executors, a scheduler and a gateway.

    Named "kvmanager", "executor" ("executor-2", ...), "scheduler" and "gateway" ("gateway-2", ...).
    """

    def __init__(
        self,
        model: Path | str,
        *,
        name: str = "tiny",
        executors: int = 1,
        spare_executors: int = 0,
        gateways: int = 1,
        kv_blocks: int | None = None,
        kvmanager: Settings | None = None,
        executor: Settings | None = None,
        scheduler: Settings | None = None,
        gateway: Settings | None = None,
    ) -> None:
        """`kv_blocks` bounds each executor's KV; the last four are settings of the services by field name."""
        self._folder = tempfile.TemporaryDirectory(prefix="quire-stack-")
        self.model_name = name
        self.services: dict[str, Service] = {}
        manager = self._add("kvmanager", "kvmanager", kvmanager or {})
        held = [str(model)] * executors + [None] * spare_executors
        targets = []
        for index, source in enumerate(held):
            settings: dict[str, object] = {"kvmanager": manager.target, "threads": 1, "dtype": "fp32"}
            settings |= {} if source is None else {"model": source, "model_name": name}
            settings |= {} if kv_blocks is None else {"kv_blocks": kv_blocks}
            label = "executor" if index == 0 else f"executor-{index + 1}"
            asked = "" if source is not None else "liveness"
            one = self._add(label, "executor", settings | dict(executor or {}), health_service=asked)
            targets.append(one.target)
        wires = {"kvmanager": manager.target, "executors": ",".join(targets)}
        planner = self._add("scheduler", "scheduler", wires | dict(scheduler or {}))
        for index in range(gateways):
            label = "gateway" if index == 0 else f"gateway-{index + 1}"
            http = f"{HOST}:{free_port()}"
            self._add(label, "gateway", {"scheduler": planner.target, "http_listen": http} | dict(gateway or {}))
        self.gateway = self.services["gateway"].target
        """Target of the public gRPC API."""
        self.http = f"http://{self.services['gateway'].settings['http_listen']}"
        """Base URL of the HTTP API; OpenAI's is at /v1 below it."""

    def __enter__(self) -> Self:
        try:
            for service in self.services.values():
                service.start()
            self.wait_ready()
            self._wait_connected()
        except BaseException:
            self._end(show=True)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(show=kind is not None)

    async def __aenter__(self) -> Self:
        return await asyncio.to_thread(self.__enter__)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.__exit__, kind, error, trace)

    def target(self, name: str) -> str:
        """gRPC address of a service."""
        return self.services[name].target

    def metrics(self, name: str) -> str:
        """URL of a service's metrics."""
        return f"http://{self.services[name].metrics}/metrics"

    def pid(self, name: str) -> int:
        process = self.services[name].process
        assert process is not None
        return process.pid

    def join(self, source: Path | str | None) -> str:
        """Starts one more executor, which no scheduler knows, and returns its name."""
        name = f"executor-{1 + sum(service.role == 'executor' for service in self.services.values())}"
        settings = self.services["executor"].settings | {"model": source, "model_name": self.model_name}
        own = {key: value for key, value in settings.items() if key not in ("listen", "metrics_listen")}
        if source is None:
            del own["model"], own["model_name"]
        self._add(name, "executor", own, health_service="" if source is not None else "liveness").start()
        self.wait_ready(name)
        return name

    def start(self, name: str) -> None:
        """Starts a service that ended. `wait_ready` waits for it."""
        self.services[name].start()

    def kill(self, name: str) -> None:
        """Ends a service without warning."""
        self.services[name].end(signal.SIGKILL, 10)

    def stop(self, name: str, seconds: float = 60.0) -> int:
        """Has a service drain and end; returns its exit status."""
        return self.services[name].end(signal.SIGTERM, seconds)

    def freeze(self, name: str) -> None:
        """Stops a service's clock; `thaw` goes on."""
        os.kill(self.pid(name), signal.SIGSTOP)

    def thaw(self, name: str) -> None:
        os.kill(self.pid(name), signal.SIGCONT)

    def log(self, name: str) -> str:
        """What a service has logged, over all its lives."""
        return self.services[name].log_path.read_text(errors="replace")

    def wait_ready(self, *names: str, seconds: float = READY_SECONDS) -> None:
        """Returns once the services (all by default) state SERVING; fails with the log where one died."""
        deadline = time.monotonic() + seconds
        for name in names or tuple(self.services):
            service = self.services[name]
            while not is_serving(service.target, service.health_service):
                assert service.process is not None, f"{name} was never started"
                status = service.process.poll()
                assert status is None, f"{name} ended with {status}:\n{self.log(name)[-3000:]}"
                assert time.monotonic() < deadline, (
                    f"{name} is not ready after {seconds:g} s:\n{self.log(name)[-3000:]}"
                )
                time.sleep(0.05)

    def _wait_connected(self, seconds: float = READY_SECONDS) -> None:
        """Returns once the scheduler has every executor: it serves from the first one on, and spare ones come later."""
        wanted = sum(service.role == "executor" for service in self.services.values())
        deadline = time.monotonic() + seconds
        while (found := connected_executors(self.target("scheduler"))) < wanted:
            assert time.monotonic() < deadline, f"the scheduler has {found} of {wanted} executors after {seconds:g} s"
            time.sleep(0.05)

    def _add(self, name: str, role: str, settings: Settings, *, health_service: str = "") -> Service:
        log = Path(self._folder.name) / f"{name}.log"
        log.touch()
        service = self.services[name] = Service(role, settings, log, health_service=health_service)
        return service

    def _end(self, *, show: bool) -> None:
        for name, service in reversed(self.services.items()):
            if service.process is not None:
                self._finish(service)
            if show:
                print(f"--- {name} ---\n{self.log(name)[-3000:]}", file=sys.stderr)
        self._folder.cleanup()

    @staticmethod
    def _finish(service: Service) -> None:
        assert service.process is not None
        if service.process.poll() is None:
            service.process.send_signal(signal.SIGCONT)
        try:
            service.end(signal.SIGTERM, 5)
        except subprocess.TimeoutExpired:
            service.end(signal.SIGKILL, 5)
