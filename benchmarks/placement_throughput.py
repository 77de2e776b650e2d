"""Throughput with the kvmanager's placement, beside random and round-robin, on one machine with eight imitated GPUs.

    python -m benchmarks.placement_throughput --trace MOONCAKE.jsonl [--parts N] [--json]

Eight modelled executors, four near each of two NUMA nodes, with KV on both: what lies on the far one takes 1.4 times as
long to read. The conversations of the trace, an eighth as long, are cut into eight parts. Of each, clients ask in the
recorded order, so many at a time that all executors have work, once with each placement: scheduler, kvmanager and
requests are the same. The interval is Student's, of the logarithms of the parts' ratios.

Random and round-robin choose the executor; where that has no room, the next one in their order. Which node of it and
which cached blocks a sequence gets is the kvmanager's choice there as well. Takes about five minutes.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.simulate import MACHINE
from quire.bench.workload import TraceScale
from quire.cli.tables import align
from quire.simulation.load import Lengths, Load
from quire.simulation.policies import policy
from quire.simulation.run import simulate
from quire.simulation.world import Scenario
from services.kvmanager.holdings import Session
from services.kvmanager.manager import KvManager
from services.kvmanager.placement import Outcome
from services.kvmanager.reservations import AllowedExecutor, Reservation, ReservationAnswer
from services.scheduler.settings import SchedulerSettings

EXECUTORS, NODES, REMOTE_DISTANCE = 8, 2, 14
PARTS = 8
STUDENT_T = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365}
"""97.5% quantiles, by the number of values whose mean is estimated."""
LENGTHS = 1 / 8
CONTEXT = 32768


class InOrder(KvManager, ABC):
    """Places a sequence on the first executor of some order that has room for it."""

    @abstractmethod
    def order(self, loads: Sequence[AllowedExecutor]) -> Sequence[AllowedExecutor]:
        """The executors in the order in which they are tried."""

    def reserve(self, session: Session, wanted: Reservation) -> ReservationAnswer | None:
        for load in self.order(wanted.executors):
            answer = super().reserve(session, replace(wanted, executors=[load]))
            if answer is None or answer.outcome != Outcome.NO_BLOCKS:
                return answer
        return super().reserve(session, wanted)  # no room anywhere


class Random(InOrder):
    """In random order."""

    def __init__(self, lease_seconds: float) -> None:
        super().__init__(lease_seconds)
        self._draw = random.Random(0)

    def order(self, loads: Sequence[AllowedExecutor]) -> Sequence[AllowedExecutor]:
        return self._draw.sample(loads, len(loads))


class RoundRobin(InOrder):
    """Takes turns."""

    def __init__(self, lease_seconds: float) -> None:
        super().__init__(lease_seconds)
        self._last = ""

    def order(self, loads: Sequence[AllowedExecutor]) -> Sequence[AllowedExecutor]:
        turns = sorted(loads, key=lambda load: (load.executor_id <= self._last, load.executor_id))
        self._last = turns[0].executor_id
        return turns


PLACEMENTS: dict[str, Callable[[float], KvManager]] = {
    "kvmanager": KvManager,
    "round-robin": RoundRobin,
    "random": Random,
}


def part_of(lengths: Lengths, part: int, concurrency: int) -> Load:
    """One of the trace's parts, in the recorded order."""
    rows = np.array_split(np.arange(len(lengths.prompts), dtype=np.int32), PARTS)[part]
    return Load(lengths, rows, np.zeros(len(rows)), np.zeros(len(rows), np.int16), concurrency)


def interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    """The geometric mean, and where it lies with 95% confidence."""
    logs = [math.log(ratio) for ratio in ratios]
    mean, half = statistics.mean(logs), STUDENT_T[len(logs)] * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


def measure(lengths: Lengths, part: int, concurrency: int) -> dict[str, dict[str, Any]]:
    """The report of each placement."""
    scenario = Scenario(
        replace(MACHINE, context_length=CONTEXT),
        part_of(lengths, part, concurrency),
        executor_count=EXECUTORS,
        node_count=NODES,
        remote_distance=REMOTE_DISTANCE,
    )
    fair = policy("fair", SchedulerSettings.model_validate({}))
    reports = {}
    for name, kvmanager in PLACEMENTS.items():
        reports[name] = simulate(scenario, fair._replace(kvmanager=kvmanager)).report
        if reports[name]["failures"]:
            raise RuntimeError(f"requests failed: {reports[name]['failures']}")
        print(f"part {part + 1}, {name}: {reports[name]['request_s']:.1f} requests/s", file=sys.stderr)
    return reports


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True, help="a Mooncake .jsonl")
    parser.add_argument("--concurrency", type=int, default=128, help="requests at a time (default: 128)")
    parser.add_argument("--parts", type=int, default=PARTS, choices=sorted(STUDENT_T), help="only the first so many")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    lengths = Lengths.trace(args.trace, TraceScale(lengths=LENGTHS))
    parts = [measure(lengths, part, args.concurrency) for part in range(args.parts)]
    found = {}
    for name in PLACEMENTS:
        reports = [part[name] for part in parts]
        gain, low, high = interval([part["kvmanager"]["request_s"] / part[name]["request_s"] for part in parts])
        found[name] = {
            "request_s": statistics.mean(report["request_s"] for report in reports),
            "output_tok_s": statistics.mean(report["output_tok_s"] for report in reports),
            "cached_share": statistics.mean(report["cached_share"] for report in reports),
            "ttft_p50_ms": statistics.mean(report["ttft_ms"]["p50"] for report in reports),
            "kvmanager_is_faster": gain,
            "interval": [low, high],
        }
    if args.json:
        print(json.dumps(found))
        return 0
    rows = [("placement", "requests/s", "output tokens/s", "cached", "first token p50", "kvmanager is faster")]
    for name, one in found.items():
        low, high = one["interval"]
        rows.append(
            (
                name,
                f"{one['request_s']:.1f}",
                f"{one['output_tok_s']:,.0f}",
                f"{one['cached_share']:.1%}",
                f"{one['ttft_p50_ms']:.0f} ms",
                "" if name == "kvmanager" else f"{one['kvmanager_is_faster']:.3f} ({low:.3f} to {high:.3f})",
            )
        )
    print(align(rows, right=range(1, 6)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
