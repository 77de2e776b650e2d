"""Runs the kvmanager: `quire serve kvmanager`."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from prometheus_client import CollectorRegistry

from quire.v1 import kvmanager_pb2, kvmanager_pb2_grpc
from services.common.rpc import Server
from services.common.startup import begin
from services.kvmanager.events import EventLog
from services.kvmanager.manager import KvManager
from services.kvmanager.metrics import KvMetrics
from services.kvmanager.retention import parse_quotas
from services.kvmanager.servicer import KvManagerServicer
from services.kvmanager.settings import KvManagerSettings

log = logging.getLogger("quire.kvmanager")


def main(argv: Sequence[str]) -> int:
    settings = begin(KvManagerSettings, "kvmanager", argv)
    asyncio.run(serve(settings))
    return 0


def build(settings: KvManagerSettings, registry: CollectorRegistry) -> tuple[Server, KvManagerServicer]:
    """A server that is not started yet, and what it serves."""
    events = EventLog(settings.event_history) if settings.event_history else None
    # Nanoseconds since 1970 grow faster than any process hands out operations.
    manager = KvManager(settings.lease_seconds, time.time_ns(), parse_quotas(settings.namespace_quotas), events)
    servicer = KvManagerServicer(manager)
    registry.register(KvMetrics(servicer))
    server = Server(settings, [kvmanager_pb2.DESCRIPTOR.services_by_name["KvManagerService"]], registry)
    kvmanager_pb2_grpc.add_KvManagerServiceServicer_to_server(servicer, server.grpc)
    return server, servicer


async def serve(settings: KvManagerSettings) -> None:
    """Serves until a signal. Ready at once: the kvmanager has nothing to warm up."""
    server, servicer = build(settings, CollectorRegistry())
    await server.start()
    await server.set_ready(True)
    log.info("serving", extra={"listen": settings.listen})
    await server.run_until_signal(servicer.close)
