"""Starts the gateway: engine, gRPC server and HTTP server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from prometheus_client import CollectorRegistry

from quire.v1 import gateway_pb2, gateway_pb2_grpc
from services.common.rpc import Server
from services.common.startup import begin
from services.gateway.engine import Engine
from services.gateway.guard import Guard
from services.gateway.identity import Identity
from services.gateway.keys.file import KeyFile
from services.gateway.servicer import AdminServicer, InferenceServicer
from services.gateway.settings import GatewaySettings

log = logging.getLogger("quire.gateway")


def main(argv: Sequence[str]) -> int:
    """Serves until SIGTERM or SIGINT; 0 after a drain."""
    settings = begin(GatewaySettings, "gateway", argv)
    asyncio.run(run(settings))
    return 0


async def run(settings: GatewaySettings) -> None:
    """Serves gRPC and HTTP. Ready while the scheduler's stream is up and a model is there."""
    from services.gateway.http.server import serve_http

    identity = open_identity(settings)
    registry = CollectorRegistry()
    engine = Engine(settings, registry)
    server = make_server(engine, identity, settings, registry)
    await server.start()
    http = await serve_http(engine, identity, settings) if settings.http_listen else None
    readiness = Readiness(server)
    engine.start(readiness.tell)
    log.info("serving", extra={"grpc": settings.listen, "http": settings.http_listen})

    try:
        await server.run_until_signal(engine.drain)
    finally:
        readiness.stop()
        await engine.stop()
        if http is not None:
            await http.stop()


def open_identity(settings: GatewaySettings) -> Identity:
    """Who is who, by the file of keys where there is one. SystemExit with a clear line where it cannot be read."""
    try:
        return Identity(None if settings.keys is None else KeyFile(settings.keys).find)
    except ValueError as error:
        raise SystemExit(f"keys: {error}") from error


def make_server(engine: Engine, identity: Identity, settings: GatewaySettings, registry: CollectorRegistry) -> Server:
    """The gRPC server with both services, behind the guard."""
    services = gateway_pb2.DESCRIPTOR.services_by_name
    server = Server(settings, list(services.values()), registry, Guard(identity))
    gateway_pb2_grpc.add_InferenceServiceServicer_to_server(InferenceServicer(engine), server.grpc)
    gateway_pb2_grpc.add_AdminServiceServicer_to_server(AdminServicer(engine), server.grpc)
    return server


class Readiness:
    """States the engine's readiness to the health service, in order."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._told: asyncio.Queue[bool] = asyncio.Queue()
        self._task = asyncio.create_task(self._follow(), name="readiness")

    def tell(self, ready: bool) -> None:
        self._told.put_nowait(ready)

    def stop(self) -> None:
        self._task.cancel()

    async def _follow(self) -> None:
        while True:
            ready = await self._told.get()
            if ready != self._server.ready:
                log.info("ready" if ready else "not ready")
                await self._server.set_ready(ready)
