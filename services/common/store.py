"""The Redis that several gateways share. Losing it is told aloud, and found again without a restart.

After a failure nothing is asked for a while, so that requests do not wait for a server that is gone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import redis.asyncio as redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

log = logging.getLogger("quire.store")

T = TypeVar("T")

PATIENCE_SECONDS = 1.0
"""How long connecting may take, and an answer."""
CONNECTIONS = 8
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 2.0
REMINDER_SECONDS = 30.0
"""How often the log repeats that the store is lost."""


class StoreLost(Exception):
    """The store did not answer, or was not asked because it just had not."""


class Store:
    """A connection pool to one database. Safe to use from one event loop."""

    def __init__(
        self, url: str, patience: float = PATIENCE_SECONDS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Connects when first used. Raises ValueError for a URL that is none."""
        self._clock = clock
        self._pause = self._silent_until = self._reminded_at = 0.0
        pool = redis.BlockingConnectionPool.from_url(
            url,
            max_connections=CONNECTIONS,
            timeout=patience,
            protocol=2,
            socket_connect_timeout=patience,
            socket_timeout=patience,
            retry=Retry(NoBackoff(), 0),  # what was sent may have been done
        )
        self.client: Any = redis.Redis.from_pool(pool)

    @property
    def name(self) -> str:
        """Of the database, without user and password."""
        place = self.client.connection_pool.connection_kwargs
        address = place.get("path") or f"{place.get('host')}:{place.get('port')}"
        return f"redis {address} {place.get('db', 0)}"

    @property
    def lost(self) -> bool:
        """Whether the last command failed."""
        return self._pause > 0

    async def ask(self, command: Callable[[], Awaitable[T]]) -> T:
        """What a command answers. Raises StoreLost."""
        if self._clock() < self._silent_until:
            raise StoreLost(f"{self.name} is out of reach")
        try:
            answer = await command()
        except (RedisError, OSError) as error:
            self._lose(error)
            raise StoreLost(f"{self.name}: {error}") from error
        if self._pause:
            self._pause = self._silent_until = 0.0
            log.warning("the store answers again", extra={"store": self.name})
        return answer

    async def close(self) -> None:
        await self.client.aclose()

    def _lose(self, error: Exception) -> None:
        now = self._clock()
        if not self._pause or now - self._reminded_at >= REMINDER_SECONDS:
            self._reminded_at = now
            log.error("the store is lost", extra={"store": self.name, "why": str(error)})
        self._pause = min(max(2 * self._pause, FIRST_PAUSE), LONGEST_PAUSE)
        self._silent_until = now + self._pause
