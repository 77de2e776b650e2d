"""Times the kvmanager's core without sockets: steady decode, cached prompts, eviction, events; and memory per block.

Run `python -m benchmarks.kvmanager`. CPU time of this thread, medians; the last line is JSON.
"""

from __future__ import annotations

import json
import statistics
import time
import tracemalloc
from array import array
from collections.abc import Callable, Mapping

from quire.v1 import kvmanager_pb2
from services.kvmanager.events import EventLog, ExecutorEvents
from services.kvmanager.executors import ExecutorSpec
from services.kvmanager.holdings import Session
from services.kvmanager.keys import KeySpace
from services.kvmanager.manager import KvManager
from services.kvmanager.pools import Pool, PoolSpec
from services.kvmanager.requests import apply_request
from services.kvmanager.reservations import AllowedExecutor, Reservation
from services.kvmanager.retention import NO_RETENTION, Quota, Retention

BLOCK_SIZE = 32
SEQUENCES = 256
PROMPT = 8192
MODEL = "0" * 64
ROUNDS = 200
QUOTAS = {"a": Quota(share=0.3), "b": Quota(share=0.3)}
PINNED = Retention(priority=50, pin_seconds=1000.0)


def made(blocks: int) -> tuple[KvManager, Session]:
    manager = KvManager(10.0)
    pool = PoolSpec(0, 0, tier=1, format=2, nodes=(), block_count=blocks, first_block_id=0, block_size=BLOCK_SIZE)
    manager.register(ExecutorSpec("e", MODEL, (pool,)), [], 1)
    return manager, manager.open_session("s", 0.0)


def reserve(manager: KvManager, session: Session, sequence_id: int, tokens: array[int], lookahead: int) -> int:
    """Tokens found in the cache."""
    wanted = Reservation(sequence_id, KeySpace(MODEL, "default"), tokens, lookahead, [AllowedExecutor("e", 1)])
    answer = manager.reserve(session, wanted)
    assert answer.blocks, answer
    return answer.cached_tokens


def median_ms(run: Callable[[], None], before: Callable[[], None] = lambda: None) -> float:
    seconds = []
    for _ in range(ROUNDS):
        before()
        start = time.thread_time()
        run()
        seconds.append(time.thread_time() - start)
    return statistics.median(seconds) * 1e3


def steady_decode() -> float:
    """Milliseconds for one step's message: progress of all sequences, and extensions of those that need one."""
    manager, session = made(SEQUENCES * 20)
    length = 100
    for sequence_id in range(1, SEQUENCES + 1):
        # Lengths differ, so that each step fills some blocks.
        tokens = array("i", [sequence_id] * (length + sequence_id % BLOCK_SIZE))
        reserve(manager, session, sequence_id, tokens, ROUNDS + 2 * BLOCK_SIZE)
        manager.progress(session, sequence_id, len(tokens), [7])
    messages = []

    def build() -> None:
        nonlocal length
        length += 1
        request = kvmanager_pb2.ReserveRequest()
        for sequence_id in range(1, SEQUENCES + 1):
            computed = length + sequence_id % BLOCK_SIZE
            request.progress.add(sequence_id=sequence_id, computed_length=computed, token_ids=[length])
            if computed % BLOCK_SIZE == 0:
                request.extend_sequence_ids.append(sequence_id)
                request.extend_token_counts.append(computed + ROUNDS + 2 * BLOCK_SIZE)
        messages.append(request)

    def step() -> None:
        response = apply_request(manager, session, messages.pop())
        assert response is not None

    milliseconds = median_ms(step, build)
    assert all(holding.computed == length + i % BLOCK_SIZE for i, holding in session.holdings.items())
    assert manager.verify() == []
    return milliseconds


def cached_match() -> float:
    """Milliseconds to reserve a prompt whose blocks are all cached, keys included."""
    manager, session = made(1024)
    tokens = array("i", range(PROMPT))
    reserve(manager, session, 1, tokens[:], 1)
    manager.progress(session, 1, PROMPT, [7])

    def run() -> None:
        assert reserve(manager, session, 2, tokens, 1) == PROMPT - BLOCK_SIZE

    def free() -> None:
        if 2 in session.holdings:
            manager.release(session, 2)

    return median_ms(run, free)


def cached_pool(
    count: int, quotas: Mapping[str, Quota], retention: Retention, events: ExecutorEvents | None = None
) -> Pool:
    """Every block cached, by prompts of 100 blocks of two namespaces, each with a pin's end of its own."""
    pool = Pool(PoolSpec(0, 0, 1, 2, (), count, 0, BLOCK_SIZE), quotas, events)
    for first in range(0, count, 100):
        pool.pass_time(first / 1e6)
        blocks = pool.acquire((), 100, ("a", "b")[first % 200 == 0])
        keys = [block.to_bytes(32, "little") for block in blocks]
        for block, key in zip(blocks, keys, strict=True):
            pool.settle(block, key)
        pool.release(blocks, keys, retention, 100)
    assert pool.blocks.cached_count == count
    return pool


def memory_per_million_blocks(quotas: Mapping[str, Quota], retention: Retention) -> float:
    """Megabytes of a pool whose million blocks are all cached."""
    tracemalloc.start()
    pool = cached_pool(1_000_000, quotas, retention)
    megabytes = tracemalloc.get_traced_memory()[0] / 1e6
    tracemalloc.stop()
    assert pool.blocks.policy.pinned_count == (500_000 if retention.pin_seconds else 0)
    return megabytes


def eviction(count: int, quotas: Mapping[str, Quota], retention: Retention, events: ExecutorEvents | None) -> float:
    """Microseconds for one block of a prompt of 256 for which others go, from taking it to leaving it cached."""
    pool = cached_pool(count, quotas, retention, events)
    number = count

    def run() -> None:
        nonlocal number
        blocks = pool.acquire((), 256, "a")
        keys = []
        for block in blocks:
            number += 1
            keys.append(number.to_bytes(32, "little"))
            pool.settle(block, keys[-1], b"", b"")
        pool.release(blocks, keys, retention, 256)

    return median_ms(run) * 1e3 / 256


def main() -> None:
    plain, kept = ({}, NO_RETENTION), (QUOTAS, PINNED)
    events = ExecutorEvents(EventLog(16384), "e")
    figures = {
        "decode_step_ms": (steady_decode(), f"a step's message, {SEQUENCES} sequences in decode"),
        "cached_match_ms": (cached_match(), f"{PROMPT} cached tokens matched, hashing included"),
        "evict_us": (eviction(10_000, *plain, None), "a block taken, filled and left, of 10,000"),
        "evict_of_million_us": (eviction(1_000_000, *plain, None), "the same of a million"),
        "evict_with_events_us": (eviction(10_000, *plain, events), "the same of 10,000, with events"),
        "evict_kept_us": (eviction(10_000, *kept, None), "the same of 10,000, with pins, priorities and quotas"),
        "evict_kept_of_million_us": (eviction(1_000_000, *kept, None), "the same of a million"),
        "million_blocks_mb": (memory_per_million_blocks(*plain), "a million cached blocks"),
        "million_blocks_kept_mb": (memory_per_million_blocks(*kept), "the same with pins, priorities and quotas"),
    }
    for name, (value, what) in figures.items():
        print(f"{what}: {value:.3g} {name.rpartition('_')[2]}")
    print(json.dumps({name: round(value, 3) for name, (value, _) in figures.items()}))


if __name__ == "__main__":
    main()
