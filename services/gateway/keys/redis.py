"""The document of keys in Redis: one text that gateways follow, and that `quire keys` edits in turn."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable
from typing import Any

import redis
from redis.exceptions import RedisError, WatchError

from services.common.errors import QuireError, Reason
from services.common.store import Store, StoreLost
from services.gateway.keys.document import Roster, parse, roster_of

log = logging.getLogger("quire.gateway.keys")

NAME = "quire:keys:1"
FOLLOW_SECONDS = 1.0
PATIENCE_SECONDS = 5.0


class RedisKeys:
    """The keys that Redis holds. While it is lost, or what it holds says nothing, they stay as they were."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._roster: Roster | None = None
        self._stamp: bytes | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def roster(self) -> Roster:
        """Who is known now. STORE_LOST before anything was ever read: nobody is let in on trust."""
        if self._roster is None:
            raise QuireError(Reason.STORE_LOST, "API keys are not known yet: the store has not answered")
        return self._roster

    async def start(self) -> None:
        """Reads them, where that is possible, and follows them from then on."""
        await self.follow()
        self._task = asyncio.create_task(self._run(), name="keys")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def follow(self) -> None:
        """Reads the document where it is another one than before."""
        try:
            stamp = await self._store.ask(lambda: self._store.client.hget(NAME, "stamp"))
            if stamp == self._stamp and self._roster is not None:
                return
            text = await self._store.ask(lambda: self._store.client.hget(NAME, "text"))
        except StoreLost:
            return  # told aloud by the store
        self._take(stamp, (text or b"").decode(errors="replace"))

    def _take(self, stamp: bytes | None, text: str) -> None:
        told, self._stamp = self._stamp is not None and stamp == self._stamp, stamp
        try:
            self._roster = roster_of(parse(text))
        except ValueError as error:
            if not told:
                log.error("the keys stay as they were", extra={"error": f"{self._store.name}: {error}"})
        else:
            log.info("keys read", extra={"keys": len(self._roster)})

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(FOLLOW_SECONDS)
            await self.follow()


class RedisPlace:
    """Where `quire keys` edits a document: in Redis."""

    def __init__(self, url: str) -> None:
        """Raises ValueError for a URL that is none."""
        seconds = {"socket_connect_timeout": PATIENCE_SECONDS, "socket_timeout": PATIENCE_SECONDS}
        self._client: Any = redis.Redis.from_url(url, protocol=2, **seconds)

    def read(self) -> str:
        """The text; empty where there is none yet. Raises ValueError where Redis does not answer."""
        try:
            return (self._client.hget(NAME, "text") or b"").decode()
        except (RedisError, OSError) as error:
            raise ValueError(f"Redis: {error}") from error

    def edit(self, change: Callable[[str], str]) -> None:
        """Writes what `change` makes of the text, again where somebody else was faster."""
        try:
            with self._client.pipeline() as pipeline:
                while True:
                    pipeline.watch(NAME)
                    text = change((pipeline.hget(NAME, "text") or b"").decode())
                    pipeline.multi()
                    pipeline.hset(NAME, mapping={"text": text, "stamp": hashlib.sha256(text.encode()).hexdigest()})
                    try:
                        pipeline.execute()
                    except WatchError:
                        continue
                    return
        except (RedisError, OSError) as error:
            raise ValueError(f"Redis: {error}") from error
