"""A million requests over 64 simulated executors: how long that takes, in how much memory.

    python -m benchmarks.simulate --trace AZURE.csv [--requests N] [--executors N] [--rate R]

Lengths are drawn from the trace, an eighth as long, and requests come at random moments. Executors are imitated
accelerators: a step takes 8 ms, 40 us more for each sequence that decodes and 30 us for each token of a prompt. One
core; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from quire.bench.workload import TraceScale
from quire.simulation.load import Lengths, Tenant, arriving
from quire.simulation.policies import policy
from quire.simulation.run import simulate
from quire.simulation.world import Scenario
from services.executor.cost_model import CostModel, Machine
from services.scheduler.settings import SchedulerSettings

BAR_SECONDS, BAR_MIB = 15 * 60.0, 2048.0
"""For a million requests."""
MILLION = 1_000_000
MACHINE = Machine(
    description={"device": "an imitated accelerator"},
    cost=CostModel(step=8e-3, decode_row=4e-5, context_token=5e-8, prompt_token=3e-5, prompt_pair=1e-9),
    residuals={},
    block_size=16,
    block_bytes=2 << 20,
    block_count=16384,
    max_sequences=64,
    max_step_tokens=2048,
    context_length=8192,
    vocab_size=128256,
)
RATE_PER_EXECUTOR = 85.0
"""Requests a second: executors are busy nearly all the time, and nothing piles up."""


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True, help="an Azure .csv")
    parser.add_argument("--requests", type=int, default=MILLION)
    parser.add_argument("--executors", type=int, default=64)
    parser.add_argument("--rate", type=float, help="requests a second (default: 85 for each executor)")
    args = parser.parse_args(argv)
    tenants = (Tenant("default"),)
    lengths = Lengths.trace(args.trace, TraceScale(lengths=1 / 8))
    load = arriving(lengths, args.requests, args.rate or RATE_PER_EXECUTOR * args.executors, 1.0, tenants, 0)
    scenario = Scenario(MACHINE, load, tenants, args.executors)
    started, cpu = time.perf_counter(), time.process_time()
    with tqdm(total=args.requests, unit="", file=sys.stderr, disable=None) as bar:
        run = simulate(scenario, policy("fair", SchedulerSettings.model_validate({})), 0.0, bar.update)
    found: dict[str, Any] = {
        "requests": args.requests,
        "executors": args.executors,
        "seconds": round(time.perf_counter() - started, 1),
        "cpu_seconds": round(time.process_time() - cpu, 1),
        "peak_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
    }
    for name in ("failures", "duration_s", "output_tok_s", "utilization", "rows_per_step", "steps", "messages"):
        found[name] = run.report[name]
    print(json.dumps(found))
    share = args.requests / MILLION
    return 0 if found["cpu_seconds"] <= BAR_SECONDS * share and found["peak_mib"] <= BAR_MIB else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
