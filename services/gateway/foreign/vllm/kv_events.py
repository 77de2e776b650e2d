"""KV events as routers index them: all executors behind the gateway are one worker to them. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from quire.v1.foreign.smg_common_pb2 import KvBlock, KvBlocksRemoved, KvBlocksStored, KvCacheEvent, KvEventBatch
from quire.v1.kvmanager_pb2 import BlockStored, SubscribeEventsResponse

_Place = tuple[str, int]  # executor and pool


class Copies:
    """Where each block lies, as one subscriber was told: stored is the first copy, removed the last one."""

    def __init__(self) -> None:
        self._places: defaultdict[int, set[_Place]] = defaultdict(set)

    def translate(self, batch: SubscribeEventsResponse) -> KvEventBatch:
        """The batch with what changed for the router; without events where a copy is left."""
        events = [*self._removed(batch), *self._stored(batch)]
        return KvEventBatch(
            sequence_number=batch.sequence_number, timestamp=batch.timestamp_ms / 1000, events=events, dp_rank=0
        )

    def _removed(self, batch: SubscribeEventsResponse) -> Iterator[KvCacheEvent]:
        gone: list[int] = []
        if batch.cleared:
            for block, places in list(self._places.items()):
                self._places[block] = {place for place in places if place[0] != batch.executor_id}
                self._forget(block, gone)
        for removed in batch.removed:
            block = block_hash(removed.key)
            self._places[block].discard((batch.executor_id, removed.pool_id))
            self._forget(block, gone)  # also where it was stored before the subscription
        if gone:
            yield KvCacheEvent(event_id=batch.sequence_number, removed=KvBlocksRemoved(block_hashes=gone))

    def _forget(self, block: int, gone: list[int]) -> None:
        """Notes a block as gone where no copy is left."""
        if not self._places[block]:
            del self._places[block]
            gone.append(block)

    def _stored(self, batch: SubscribeEventsResponse) -> Iterator[KvCacheEvent]:
        for stored in batch.stored:
            places = self._places[block_hash(stored.key)]
            if not places and stored.token_ids:  # without its tokens a router cannot know what it is
                yield KvCacheEvent(event_id=batch.sequence_number, stored=_block(stored))
            places.add((batch.executor_id, stored.pool_id))


def block_hash(key: bytes) -> int:
    """The first eight bytes of a block's key, as the number that the wire has room for."""
    return int.from_bytes(key[:8], "big", signed=True)


def _block(stored: BlockStored) -> KvBlocksStored:
    block = KvBlock(
        block_hash=block_hash(stored.key), token_ids=stored.token_ids, block_size=stored.block_size, cache_level=0
    )
    parent = block_hash(stored.parent_key) if stored.parent_key else None
    return KvBlocksStored(blocks=[block], parent_block_hash=parent)
