"""Times the kvmanager's core without sockets: steady decode, a fully cached prompt, memory per block.

Run `python -m benchmarks.kvmanager`. The last line is JSON.
"""

from __future__ import annotations

import json
import statistics
import time
import tracemalloc
from array import array
from collections.abc import Callable

from quire.v1 import kvmanager_pb2
from services.kvmanager.executors import ExecutorSpec
from services.kvmanager.holdings import Session
from services.kvmanager.keys import KeySpace
from services.kvmanager.manager import KvManager
from services.kvmanager.pools import Pool, PoolSpec
from services.kvmanager.requests import apply_request
from services.kvmanager.reservations import AllowedExecutor, Reservation

BLOCK_SIZE = 32
SEQUENCES = 256
PROMPT = 8192
MODEL = "0" * 64
ROUNDS = 200


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
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
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


def memory_per_million_blocks() -> float:
    """Megabytes of a pool whose million blocks are all cached."""
    count = 1_000_000
    tracemalloc.start()
    pool = Pool(PoolSpec(0, 0, 1, 2, (), count, 0, BLOCK_SIZE))
    for block in pool.acquire((), count):
        pool.settle(block, block.to_bytes(32, "little"))
        pool.release([block], [])
    megabytes = tracemalloc.get_traced_memory()[0] / 1e6
    tracemalloc.stop()
    assert pool.blocks.cached_count == count
    return megabytes


def main() -> None:
    figures = {
        "decode_step_ms": round(steady_decode(), 3),
        "cached_match_ms": round(cached_match(), 3),
        "million_blocks_mb": round(memory_per_million_blocks(), 1),
    }
    print(f"steady decode, {SEQUENCES} sequences, message to answer: {figures['decode_step_ms']} ms a step")
    print(f"match of {PROMPT} cached tokens, hashing included: {figures['cached_match_ms']} ms")
    print(f"a million cached blocks: {figures['million_blocks_mb']} MB")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
