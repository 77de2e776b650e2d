"""Starts the gateway: engine, gRPC server and HTTP server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge

from quire.v1 import admin_pb2, admin_pb2_grpc, gateway_pb2, gateway_pb2_grpc
from quire.v1.foreign import (
    open_inference_pb2,
    open_inference_pb2_grpc,
    vllm_engine_pb2,
    vllm_engine_pb2_grpc,
)
from services.common.rpc import Server
from services.common.startup import begin
from services.common.store import Store
from services.gateway.calls import Calls
from services.gateway.engine import Engine
from services.gateway.foreign.open_inference.servicer import OpenInferenceServicer
from services.gateway.foreign.vllm.servicer import VllmEngineServicer
from services.gateway.guard import Guard
from services.gateway.identity import Identity
from services.gateway.journal.shared import SharedJournal
from services.gateway.keys.file import KeyFile
from services.gateway.keys.redis import RedisKeys
from services.gateway.quota.memory_ledger import MemoryLedger
from services.gateway.quota.quota import Quota
from services.gateway.quota.redis_ledger import RedisLedger
from services.gateway.quota.usage import MemoryUsage, RedisUsage
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

    registry = CollectorRegistry()
    store = None if settings.redis is None else Store(settings.redis.get_secret_value())
    keys = open_keys(settings, store)
    identity = Identity(keys)
    if isinstance(keys, RedisKeys):
        await keys.start()
    engine = Engine(settings, registry, open_quota(settings, registry, store), open_journal(settings, store))
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
        if isinstance(keys, RedisKeys):
            await keys.stop()
        if store is not None:
            await store.close()


def open_keys(settings: GatewaySettings, store: Store | None) -> KeyFile | RedisKeys | None:
    """Where keys are kept, if anywhere. SystemExit with a clear line for a file that cannot be read."""
    if settings.keys is None:
        return None
    if settings.keys_in_redis:
        assert store is not None
        return RedisKeys(store)
    try:
        return KeyFile(settings.keys)
    except ValueError as error:
        raise SystemExit(f"keys: {error}") from error


def open_journal(settings: GatewaySettings, store: Store | None) -> SharedJournal | None:
    """Where other gateways find this one's streams, if they do."""
    if settings.journal == "memory" or store is None:
        return None
    return SharedJournal(store, settings.resume_window)


def open_quota(settings: GatewaySettings, registry: CollectorRegistry, store: Store | None) -> Quota:
    """Limits and usage, shared with other gateways where there is a store."""
    refusals = Counter("quire_gateway_refusals", "Requests refused by a limit", ("limit",), registry=registry)

    def refused(limit: str) -> None:
        refusals.labels(limit).inc()

    if store is None:
        return Quota(MemoryLedger(), MemoryUsage(), on_refusal=refused)
    lost = Gauge("quire_gateway_store_lost", "1 while Redis does not answer", registry=registry)
    lost.set_function(lambda: store.lost)
    return Quota(RedisLedger(store), RedisUsage(store), settings.redis_lost, refused)


def make_server(engine: Engine, identity: Identity, settings: GatewaySettings, registry: CollectorRegistry) -> Server:
    """The gRPC server with our services and those of other protocols, behind the guard."""
    files = (gateway_pb2.DESCRIPTOR, admin_pb2.DESCRIPTOR, open_inference_pb2.DESCRIPTOR, vllm_engine_pb2.DESCRIPTOR)
    services = [service for file in files for service in file.services_by_name.values()]
    server, calls = Server(settings, services, registry, Guard(identity)), Calls(engine)
    gateway_pb2_grpc.add_InferenceServiceServicer_to_server(InferenceServicer(engine, calls), server.grpc)
    admin_pb2_grpc.add_AdminServiceServicer_to_server(AdminServicer(engine), server.grpc)
    open_inference_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(
        OpenInferenceServicer(engine, calls), server.grpc
    )
    vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(VllmEngineServicer(engine, calls), server.grpc)
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
