"""What a cache of a given size would have found of a recorded load's prompts: the real pool and index, and bounds.

Requests come one after the other: each finds its prefix, fills its prompt's blocks and leaves. Outputs are not known
and take no memory.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from services.kvmanager.eviction import PolicyFactory
from services.kvmanager.pools import Pool, PoolSpec

HASH_TOKENS = 512
"""Tokens that one id of a trace stands for."""
MOST_IDS = 1 << 48
BESIDE_DISTINCT = 2
"""Blocks beyond its distinct full ones that a load needs: an unfinished one, and the last full one, computed again."""


class TraceRequest(NamedTuple):
    """A prompt. Equal ids stand for equal text after equal text."""

    at: float  # seconds
    length: int  # tokens
    ids: tuple[int, ...]  # of each `HASH_TOKENS` tokens, the last of what is left

    def keys(self, block_size: int) -> list[bytes]:
        """One for each full block."""
        each = HASH_TOKENS // block_size
        keys = [(first * each + index).to_bytes(8, "little") for first in self.ids for index in range(each)]
        return keys[: self.length // block_size]

    def findable(self, block_size: int) -> int:
        """Full blocks that may be found: at least one token is computed."""
        return (self.length - 1) // block_size


class Tally(NamedTuple):
    """Tokens of prompts, those of them found in the cache, and prompts that no cache of that size can hold."""

    query_tokens: int
    hit_tokens: int
    refused_count: int = 0
    evicted_count: int = 0

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.query_tokens if self.query_tokens else 0.0


Replay = Callable[[Iterable[TraceRequest], int, int], Tally]


def read_trace(path: Path) -> list[TraceRequest]:
    """Requests of a file in Mooncake's format: lines of JSON. Raises ValueError with the line that is no such thing."""
    requests = []
    with path.open(errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            try:
                fields = json.loads(line)
                request = TraceRequest(
                    float(fields["timestamp"]) / 1000, int(fields["input_length"]), tuple(map(int, fields["hash_ids"]))
                )
            except (ValueError, TypeError, KeyError) as error:
                raise ValueError(f"{path}, line {number}: no request of a trace ({error!r})") from None
            whole = request.length > 0 and len(request.ids) == -(-request.length // HASH_TOKENS)
            if not whole or min(request.ids) < 0 or max(request.ids) >= MOST_IDS:
                raise ValueError(f"{path}, line {number}: {len(request.ids)} ids for {request.length} tokens")
            requests.append(request)
    if not requests:
        raise ValueError(f"{path}: no requests")
    return requests


def distinct_blocks(requests: Iterable[TraceRequest], block_size: int) -> int:
    """Different full blocks of all prompts."""
    lengths: dict[int, int] = {}
    for request in requests:
        for index, first in enumerate(request.ids):
            tokens = min(HASH_TOKENS, request.length - index * HASH_TOKENS)
            lengths[first] = max(lengths.get(first, 0), tokens // block_size)
    return sum(lengths.values())


def replay_pool(requests: Iterable[TraceRequest], block_size: int, block_count: int, policy: PolicyFactory) -> Tally:
    """The kvmanager's own pool and index."""
    spec = PoolSpec(0, 0, tier=1, format=0, nodes=(), block_count=block_count, first_block_id=0, block_size=block_size)
    pool = Pool(spec, policy=policy)
    query_tokens = hit_tokens = refused_count = 0
    for request in requests:
        query_tokens += request.length
        if spec.blocks_for(request.length) > block_count:
            refused_count += 1
            continue
        keys = request.keys(block_size)
        pool.pass_time(request.at)
        matched = pool.index.match(keys[: request.findable(block_size)])
        blocks = pool.acquire(matched, spec.blocks_for(request.length) - len(matched))
        for block, key in zip(blocks[len(matched) : len(keys)], keys[len(matched) :], strict=True):
            pool.settle(block, key)
        pool.release(blocks, keys)
        hit_tokens += len(matched) * block_size
    return Tally(query_tokens, hit_tokens, refused_count, pool.evicted_count)


def replay_ideal(requests: Iterable[TraceRequest], block_size: int) -> Tally:
    """A cache that forgets nothing."""
    seen: set[bytes] = set()
    query_tokens = hit_tokens = 0
    for request in requests:
        keys = request.keys(block_size)
        query_tokens += request.length
        hit_tokens += block_size * _leading(keys[: request.findable(block_size)], seen)
        seen.update(keys)
    return Tally(query_tokens, hit_tokens)


def replay_plain_lru(requests: Iterable[TraceRequest], block_size: int, block_count: int) -> Tally:
    """A cache of single blocks that drops the least recently read or written one, whatever builds on it."""
    cached: OrderedDict[bytes, None] = OrderedDict()
    query_tokens = hit_tokens = refused_count = 0
    for request in requests:
        keys = request.keys(block_size)
        query_tokens += request.length
        if -(-request.length // block_size) > block_count:
            refused_count += 1
            continue
        hit_tokens += block_size * _leading(keys[: request.findable(block_size)], cached)
        for key in keys:
            cached[key] = None
            cached.move_to_end(key)
        while len(cached) > block_count:
            cached.popitem(last=False)
    return Tally(query_tokens, hit_tokens, refused_count)


def _leading(keys: Sequence[bytes], known: OrderedDict[bytes, None] | set[bytes]) -> int:
    """How many keys are known before the first that is not."""
    return next((index for index, key in enumerate(keys) if key not in known), len(keys))


def counted(requests: Sequence[TraceRequest], done: Callable[[int], object]) -> Iterator[TraceRequest]:
    """The requests; `done` hears of each that was dealt with."""
    for request in requests:
        yield request
        done(1)
