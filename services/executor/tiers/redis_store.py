"""Blocks in Redis, by key. How long they stay is Redis' business: its memory limit and eviction policy.

One command stores an entry, so Redis never shows half of one; what lies between may, hence the checksum. After a
failure nothing is asked for a while: moves fail at once, and the thread is free for other work.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from services.executor.tiers.entry import HEADER_BYTES, check_entry, identity_of, make_header
from services.executor.tiers.store import Outcome, StoreError

log = logging.getLogger("quire.executor")

VERSION = "1"
CONNECT_SECONDS, TRANSFER_SECONDS = 1.0, 2.0
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 10.0


class RedisStore:
    """A RemoteStore. Keys: quire:kv:<version>:<model fingerprint>:<format>:<key of the block in hex>."""

    def __init__(self, url: str, fingerprint: str, clock: Callable[[], float] = time.monotonic) -> None:
        """Connects when first used. Raises ValueError for a URL that is none."""
        self._fingerprint = fingerprint
        self._clock = clock
        self._pause, self._silent_until = 0.0, 0.0
        self._client: Any = redis.Redis.from_url(
            url,
            protocol=2,
            socket_connect_timeout=CONNECT_SECONDS,
            socket_timeout=TRANSFER_SECONDS,
            # A pooled connection may have died unnoticed. Storing twice is storing once.
            retry=Retry(NoBackoff(), 1, supported_errors=(redis.exceptions.ConnectionError,)),
        )

    @property
    def name(self) -> str:
        """Of the database, without user and password."""
        place = self._client.connection_pool.connection_kwargs
        address = place.get("path") or f"{place.get('host')}:{place.get('port')}"
        return f"redis {address} {place.get('db', 0)}"

    def get(self, format_: str, key: bytes, block_bytes: int) -> memoryview:
        entry = self._call(lambda: self._client.get(self._name(format_, key)))
        if entry is None:
            raise StoreError(Outcome.MISSING, "the remote store does not hold it")
        header, block = memoryview(entry)[:HEADER_BYTES], memoryview(entry)[HEADER_BYTES:]
        if len(block) != block_bytes:
            raise StoreError(Outcome.DAMAGED, "an entry of the remote store is cut")
        check_entry(self._identity(format_), key, header, block)
        return block

    def put(self, format_: str, key: bytes, block: memoryview) -> None:
        header = make_header(self._identity(format_), key, block)
        self._call(lambda: self._client.set(self._name(format_, key), b"".join((header, block))))

    def close(self) -> None:
        self._client.close()

    def _name(self, format_: str, key: bytes) -> str:
        return f"quire:kv:{VERSION}:{self._fingerprint}:{format_}:{key.hex()}"

    def _identity(self, format_: str) -> bytes:
        return identity_of(VERSION, self._fingerprint, format_)

    def _call(self, command: Callable[[], Any]) -> Any:
        if self._clock() < self._silent_until:
            raise StoreError(Outcome.UNREACHABLE, "the remote store is out of reach")
        try:
            answer = command()
        except redis.exceptions.OutOfMemoryError as error:
            raise StoreError(Outcome.FULL, "the remote store is full") from error
        except (redis.exceptions.RedisError, OSError) as error:
            if not self._pause:  # named once
                log.warning("the remote KV store is out of reach", extra={"why": str(error)})
            self._pause = min(max(2 * self._pause, FIRST_PAUSE), LONGEST_PAUSE)
            self._silent_until = self._clock() + self._pause
            raise StoreError(Outcome.UNREACHABLE, f"the remote store: {error}") from error
        if self._pause:
            self._pause = 0.0
            log.info("the remote KV store answers again")
        return answer
