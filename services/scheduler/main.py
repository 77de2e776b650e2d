"""Runs the scheduler: `quire serve scheduler`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from prometheus_client import CollectorRegistry

from quire.v1 import scheduler_pb2, scheduler_pb2_grpc
from services.common.rpc import Server
from services.common.startup import begin
from services.scheduler.loop import SchedulerLoop
from services.scheduler.metrics import SchedulerMetrics
from services.scheduler.servicer import SchedulerServicer
from services.scheduler.settings import SchedulerSettings

log = logging.getLogger("quire.scheduler")


def main(argv: Sequence[str]) -> int:
    """Runs a scheduler until a signal; 1 where its core broke."""
    settings = begin(SchedulerSettings, "scheduler", argv)
    return asyncio.run(serve(settings))


async def serve(settings: SchedulerSettings) -> int:
    """Serves until a signal. Ready while the kvmanager and an executor with a model are connected."""
    registry = CollectorRegistry()
    server = Server(settings, [scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"]], registry)
    loop = SchedulerLoop(settings, server.set_ready)
    registry.register(SchedulerMetrics(loop.state))
    scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(SchedulerServicer(loop), server.grpc)
    await server.start()
    log.info("serving", extra={"listen": settings.listen})
    running = asyncio.create_task(loop.run())
    serving = asyncio.create_task(server.run_until_signal(loop.drain))
    await asyncio.wait({running, serving}, return_when=asyncio.FIRST_COMPLETED)
    if serving.done():
        running.cancel()
        await asyncio.wait({running})
        serving.result()
        return 0
    log.critical("the scheduler's core broke", exc_info=running.exception())
    serving.cancel()
    await server.grpc.stop(0)
    return 1
