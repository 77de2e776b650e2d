"""How many sequences placement puts next to what computes them, beside an oracle.

    python -m benchmarks.placement [--json]

Eight executors, four on each of two NUMA nodes, as on a machine with eight GPUs: each has blocks on its own node and
as many on the other one, which cost 40% more time to reach. Sequences of random lengths arrive, stay for a while and
leave; the real kvmanager places each. The oracle puts a sequence on its own node wherever all local blocks of all
executors together have room, as if they were one pool: no placement can do better at that moment.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
from array import array
from dataclasses import asdict, dataclass

from services.kvmanager.executors import DEVICE, ExecutorSpec
from services.kvmanager.keys import KeySpace
from services.kvmanager.manager import KvManager
from services.kvmanager.placement import LOCAL_DISTANCE, Outcome
from services.kvmanager.pools import PoolSpec
from services.kvmanager.reservations import AllowedExecutor, Reservation

EXECUTORS, NODES = 8, 2
BLOCK_SIZE, BLOCKS = 16, 2048
REMOTE_DISTANCE = 14
BF16 = 2


@dataclass(frozen=True, slots=True)
class Outcomes:
    """Of one load: how full the local blocks were asked to be, and where sequences went."""

    load: float  # of the local blocks, on average
    sequences: int
    local: int
    oracle_local: int
    refused: int

    @property
    def share(self) -> float:
        """Of the oracle's local placements."""
        return self.local / self.oracle_local


def make_manager() -> KvManager:
    manager = KvManager(10.0)
    for number in range(EXECUTORS):
        own = number * NODES // EXECUTORS
        pools = [
            PoolSpec(node, 0, DEVICE, BF16, (node,), BLOCKS, node * BLOCKS, BLOCK_SIZE, 0, distance)
            for node, distance in sorted(
                (node, LOCAL_DISTANCE if node == own else REMOTE_DISTANCE) for node in range(NODES)
            )
        ]
        manager.register(ExecutorSpec(f"gpu{number}", "model", tuple(pools)), [], 1)
    return manager


def run(load: float, count: int, seed: int) -> Outcomes:
    """`load` 1 asks for as many blocks on average as are local."""
    draw, manager = random.Random(seed), make_manager()
    session = manager.open_session("benchmark", 0.0)
    running: list[tuple[float, int, str, int, bool]] = []  # end, sequence, executor, blocks, local for the oracle
    counts = dict.fromkeys(manager.executors, 0)
    oracle_free = EXECUTORS * BLOCKS
    local = oracle_local = refused = 0
    mean_blocks, stay = 64.0, 100.0
    gap = mean_blocks * stay / (load * EXECUTORS * BLOCKS)
    now = 0.0
    for sequence in range(1, count + 1):
        now += draw.expovariate(1 / gap)
        while running and running[0][0] <= now:
            _, ended, name, blocks, was_local = heapq.heappop(running)
            if name:
                manager.release(session, ended)
                counts[name] -= 1
            oracle_free += blocks * was_local
        tokens = max(1, int(draw.expovariate(1 / (mean_blocks * BLOCK_SIZE))))
        blocks = -(-tokens // BLOCK_SIZE)
        allowed = [AllowedExecutor(name, 1, running_count) for name, running_count in counts.items()]
        answer = manager.reserve(
            session,
            Reservation(sequence, KeySpace("model", str(sequence)), array("i", [1]) * tokens, 0, allowed),
        )
        assert answer is not None
        by_oracle = oracle_free >= blocks
        oracle_free -= blocks * by_oracle
        oracle_local += by_oracle
        name = answer.executor_id
        if answer.outcome == Outcome.GRANTED:
            counts[name] += 1
            local += int(name[3:]) * NODES // EXECUTORS == answer.node
        else:
            refused += 1
        heapq.heappush(running, (now + draw.expovariate(1 / stay), sequence, name, blocks, by_oracle))
    return Outcomes(load, count, local, oracle_local, refused)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=4000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    results = [run(load, options.sequences, seed=1) for load in (0.5, 0.8, 0.9, 1.0, 1.2)]
    if options.json:
        print(json.dumps([asdict(result) | {"share": result.share} for result in results], indent=2))
        return 0
    print(f"{'load':>5} {'sequences':>10} {'local':>7} {'oracle':>7} {'share':>7} {'refused':>8}")
    for r in results:
        print(f"{r.load:5.1f} {r.sequences:10} {r.local:7} {r.oracle_local:7} {r.share:7.1%} {r.refused:8}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
