"""Events as their followers get them: each reads the log at its own pace, and is told where it fell out of it."""

from __future__ import annotations

import asyncio
import sys
from array import array
from collections.abc import AsyncIterator

from quire.v1 import kvmanager_pb2, types_pb2
from services.common.errors import QuireError, Reason
from services.kvmanager.events import EventBatch, EventLog, Lost, Stored

READ_LIMIT = 64
"""Batches that a follower takes out of the log at a time."""


class EventFeed:
    """A follower is a position in the log and nothing else, so slow ones take no memory."""

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._news = asyncio.Event()
        self._end: QuireError | None = None

    def publish(self, timestamp_ms: int) -> None:
        """To be called after each change of the core: gives followers what it wrote."""
        if self._log.commit(timestamp_ms):
            self._wake()

    def close(self, error: QuireError) -> None:
        """Ends all followers, after what was published, with this status."""
        self._end = error
        self._wake()

    async def follow(self, start: int) -> AsyncIterator[EventBatch]:
        """Batches from number `start` on, 0 for those to come. Ends by raising only.

        Raises OUT_OF_RANGE where `start` is not kept, and SLOW_READER once the log has overtaken the follower.
        """
        number, limit = start or self._log.next_number, Reason.OUT_OF_RANGE
        while True:
            try:
                batches = self._log.read(number, READ_LIMIT)
            except Lost as lost:
                raise QuireError(limit, str(lost), field="start_sequence_number") from None
            limit = Reason.SLOW_READER
            news = self._news
            for batch in batches:
                yield batch
                number = batch.number + 1
            if not batches:
                if self._end is not None:
                    raise self._end
                await news.wait()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


def write_batch(batch: EventBatch) -> kvmanager_pb2.SubscribeEventsResponse:
    return kvmanager_pb2.SubscribeEventsResponse(
        sequence_number=batch.number,
        timestamp_ms=batch.timestamp_ms,
        executor_id=batch.executor_id,
        cleared=batch.cleared,
        removed=[
            kvmanager_pb2.BlockRemoved(
                key=event.key, tier=types_pb2.Tier.ValueType(event.pool.tier), pool_id=event.pool.pool_id
            )
            for event in batch.removed
        ],
        stored=[_write_stored(event) for event in batch.stored],
    )


def _write_stored(event: Stored) -> kvmanager_pb2.BlockStored:
    tokens = array("i")
    tokens.frombytes(event.tokens)
    if sys.byteorder == "big":
        tokens.byteswap()
    return kvmanager_pb2.BlockStored(
        key=event.key,
        parent_key=event.parent,
        token_ids=tokens,
        block_size=event.pool.block_size,
        tier=types_pb2.Tier.ValueType(event.pool.tier),
        pool_id=event.pool.pool_id,
        adapter=event.adapter,
    )
