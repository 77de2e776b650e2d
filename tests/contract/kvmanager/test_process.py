"""The kvmanager as a process: ready at once, light, and quick to end while peers are connected."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quire.v1 import kvmanager_pb2_grpc
from services.common.errors import Reason
from services.common.rpc import channel
from services.kvmanager.settings import KvManagerSettings
from tests.contract.kvmanager.conftest import Executor, Scheduler
from tests.contract.kvmanager.test_reserve_stream import failure

CODE = """
import sys
from services.kvmanager.main import main
code = main(sys.argv[1:])
assert not {"torch", "transformers"} & set(sys.modules)
sys.exit(code)
"""


def test_defaults() -> None:
    settings = KvManagerSettings()
    assert (settings.listen, settings.metrics_listen, settings.lease_seconds) == (
        "127.0.0.1:50053",
        "127.0.0.1:9103",
        10.0,
    )


async def test_serves_at_once_and_ends_streams_when_told_to_stop(tmp_path: Path) -> None:
    listen = f"unix:{tmp_path}/kv.sock"
    arguments = ["--listen", listen, "--metrics-listen", "", "--lease-seconds", "7"]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CODE, *arguments, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with channel(listen, KvManagerSettings(listen=listen, metrics_listen="")) as peer:
            check = health_pb2_grpc.HealthStub(peer).Check
            request = health_pb2.HealthCheckRequest(service="quire.v1.KvManagerService")
            health = await check(request, wait_for_ready=True, timeout=20)
            assert health.status == health_pb2.HealthCheckResponse.SERVING
            stub = kvmanager_pb2_grpc.KvManagerServiceStub(peer)
            scheduler, executor = Scheduler(stub), Executor(stub)
            assert (await scheduler.hello()).lease_ms == 7000
            await executor.register()
            started = time.monotonic()
            process.send_signal(signal.SIGTERM)
            assert (await failure(scheduler.call)).reason == Reason.DRAINING
            assert (await failure(executor.call)).reason == Reason.DRAINING
            assert await executor.call.code() == grpc.StatusCode.UNAVAILABLE
        assert await asyncio.wait_for(process.wait(), 10) == 0
        assert time.monotonic() - started < 5
    finally:
        if process.returncode is None:
            process.kill()
            _, errors = await process.communicate()
            print(errors.decode())
