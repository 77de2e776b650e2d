"""Health follows the engine's heartbeat: a step that never returns, or a dead step thread, is not healthy."""

from __future__ import annotations

import asyncio
import logging
import time

from services.common.rpc import Server
from services.executor.engine import Engine

log = logging.getLogger("quire.executor")


async def watch(engine: Engine, limit: float, server: Server) -> None:
    """Looks a few times per `limit` seconds, at most every 5 s; withdraws both kinds of health and returns them."""
    withdrawn = False
    while True:
        await asyncio.sleep(min(limit / 4, 5.0))
        since = engine.worker.steps.computing_since
        stuck = not engine.worker.alive or (since is not None and time.monotonic() - since > limit)
        if stuck and not withdrawn:
            log.error("the step thread is stuck or dead", extra={"limit_seconds": limit})
            await server.set_alive(False)
            await server.set_ready(False)
        elif withdrawn and not stuck:
            log.info("the step thread computes again")
            await server.set_alive(True)
            await server.set_ready(engine.model is not None)
        withdrawn = stuck
