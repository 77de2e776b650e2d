"""The standard gRPC health check, as a question with a time limit and as a wait."""

from __future__ import annotations

import asyncio

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

SERVING = health_pb2.HealthCheckResponse.SERVING
# A service that is still importing refuses connections; ask again soon, not after gRPC's growing back-off.
_OPTIONS = [("grpc.initial_reconnect_backoff_ms", 50), ("grpc.max_reconnect_backoff_ms", 200)]


async def ask(target: str, service: str = "", seconds: float = 2.0) -> str:
    """The answer in words: "SERVING", "NOT_SERVING", "SERVICE_UNKNOWN" or "UNREACHABLE"."""
    async with grpc.aio.insecure_channel(target) as channel:
        try:
            answer = await health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=service), timeout=seconds
            )
        except grpc.aio.AioRpcError as error:
            return "SERVICE_UNKNOWN" if error.code() == grpc.StatusCode.NOT_FOUND else "UNREACHABLE"
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


async def wait_serving(target: str, service: str = "") -> None:
    """Returns once the service states SERVING. Waits for ever; bound it with asyncio.wait_for or a cancel."""
    async with grpc.aio.insecure_channel(target, options=_OPTIONS) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while True:
            try:
                async for answer in stub.Watch(health_pb2.HealthCheckRequest(service=service), wait_for_ready=True):
                    if answer.status == SERVING:
                        return
            except grpc.aio.AioRpcError:
                await asyncio.sleep(0.1)
