"""Readiness follows the engine's heartbeat: a step that never returns, or a dead step thread, is not ready."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from services.executor.engine import Engine

log = logging.getLogger("quire.executor")


async def watch(engine: Engine, limit: float, set_ready: Callable[[bool], Awaitable[None]]) -> None:
    """Looks a few times per `limit` seconds, at most every 5 s; withdraws readiness and gives it back."""
    withdrawn = False
    while True:
        await asyncio.sleep(min(limit / 4, 5.0))
        since = engine.worker.steps.computing_since
        stuck = not engine.worker.alive or (since is not None and time.monotonic() - since > limit)
        if stuck and not withdrawn:
            log.error("the step thread is stuck or dead", extra={"limit_seconds": limit})
            await set_ready(False)
        elif withdrawn and not stuck:
            log.info("the step thread computes again")
            await set_ready(engine.model is not None)
        withdrawn = stuck
