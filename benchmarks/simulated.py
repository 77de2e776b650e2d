"""Does `quire simulate` say what the real stack does?

The engine of this machine is measured (`quire bench engine --fit`), then the first requests of a trace go to a real
stack and to the simulator, in turn: so many at a time, or at random moments. Throughput and the 95th percentile of the
time to the first token are compared.

    python -m benchmarks.simulated --trace conversations.csv [--concurrency 16] [--rounds 2]
    python -m benchmarks.simulated --trace conversations.csv --rate 2

The load generator and the services compute on the engine's own cores here: their CPU time is measured in the real run
and given to the simulator, message by message, as time in which the executor stands still, for a thread that is held up
holds up the others at their next barrier. Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.idle import totals
from benchmarks.stack import add_stack_flags, engine_flags, exit_on_failure, quire, stack
from quire.bench.clients import GrpcClient, Manner
from quire.bench.load import closed_loop, open_loop
from quire.bench.measures import Sample, percentile
from quire.bench.workload import Request, TraceScale, poisson_requests, trace_requests
from quire.cli.common import gateway_address
from quire.simulation.load import Lengths, Load
from quire.simulation.policies import policy
from quire.simulation.run import simulate
from quire.simulation.world import Scenario
from services.executor.cost_model import Machine
from services.scheduler.settings import SchedulerSettings

THROUGHPUT_BAR, FIRST_TOKEN_BAR = 0.10, 0.20
"""Most that the simulator may be off."""


async def serve(address: str, requests: Sequence[Request], concurrency: int | None, seed: int) -> list[Sample]:
    """Samples of all requests. Exits where one failed."""
    samples: list[Sample] = []
    async with GrpcClient(address, Manner()) as client:
        if concurrency is None:
            await open_loop(client, requests, seed, samples.append)
        else:
            await closed_loop(client, requests, concurrency, seed, samples.append)
    exit_on_failure(samples)
    return samples


def load_of(requests: Sequence[Request], concurrency: int | None) -> Load:
    """The same requests for the simulator."""
    lengths = Lengths(
        np.array([request.prompt_tokens for request in requests], np.int32),
        np.array([request.output_tokens for request in requests], np.int32),
    )
    rows = np.arange(len(requests), dtype=np.int32)
    arrivals = np.array([0.0 if concurrency else request.arrival for request in requests])
    return Load(lengths, rows, arrivals, np.zeros(len(requests), np.int16), concurrency)


def service_seconds(run_folder: str) -> float:
    """CPU time so far of this process and of the services that the run folder's stack has beside its executors."""
    ticks, mark = os.sysconf("SC_CLK_TCK"), f"QUIRE_RUN_DIR={run_folder}".encode()
    total = time.process_time()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().split(b"\0")
            if b"serve" not in command or b"executor" in command:
                continue
            if mark in (process / "environ").read_bytes().split(b"\0"):
                fields = (process / "stat").read_text().rpartition(")")[2].split()
                total += (int(fields[11]) + int(fields[12])) / ticks
        except OSError:
            continue  # it ended, or is another user's
    return total


def measure(args: argparse.Namespace, folder: str, requests: Sequence[Request], number: int) -> dict[str, float]:
    """One round: the engine, the stack, the simulator."""
    fit = Path(folder) / "machine.json"
    quire("bench", "engine", *engine_flags(args), "--fit", str(fit), "--json", environment=dict(os.environ))
    before, steps_before = service_seconds(folder), totals(args.metrics)
    samples = asyncio.run(serve(gateway_address(args), requests, args.concurrency, seed=number))
    spent = service_seconds(folder) - before
    compute = totals(args.metrics)["compute"] - steps_before["compute"]
    seconds = max(sample.end for sample in samples) - min(sample.start for sample in samples)
    first = [sample.arrivals[0] - sample.start for sample in samples]

    fair = policy("fair", SchedulerSettings.model_validate({}))
    scenario = Scenario(Machine.read(fit), load_of(requests, args.concurrency))
    alone = simulate(scenario, fair).report
    handled = alone["duration_s"] * (alone["scheduler_busy_share"] + alone["kvmanager_busy_share"])
    handled /= scenario.latencies.message  # messages
    shared = replace(scenario, latencies=replace(scenario.latencies, message=spent / handled), shared_cores=1.0)
    report = simulate(shared, fair).report
    real, simulated = sum(sample.output_tokens for sample in samples) / seconds, report["output_tok_s"]
    return {
        "output_tok_s": real,
        "simulated_output_tok_s": simulated,
        "alone_output_tok_s": alone["output_tok_s"],
        "compute_s": compute,
        "simulated_compute_s": report["duration_s"] * report["utilization"],
        "alone_compute_s": alone["duration_s"] * alone["utilization"],
        "ttft_p50_ms": percentile(first, 50) * 1e3,
        "simulated_ttft_p50_ms": report["ttft_ms"]["p50"],
        "ttft_p95_ms": percentile(first, 95) * 1e3,
        "simulated_ttft_p95_ms": report["ttft_ms"]["p95"],
        "service_ms_per_token": spent / sum(sample.output_tokens for sample in samples) * 1e3,
        "throughput_ratio": simulated / real,
        "ttft_p95_ratio": report["ttft_ms"]["p95"] / (percentile(first, 95) * 1e3),
    }


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_stack_flags(parser)
    parser.add_argument("--trace", type=Path, required=True, metavar="FILE", help="an Azure .csv or a Mooncake .jsonl")
    parser.add_argument("--metrics", default="http://127.0.0.1:9104/metrics", help="of the executor")
    parser.add_argument("--lengths", type=float, default=1 / 8, help="multiplies the trace's lengths (default: 1/8)")
    parser.add_argument("--requests", type=int, default=200)
    moments = parser.add_mutually_exclusive_group()
    moments.add_argument("--concurrency", type=int, default=16, help="requests at a time (default: 16)")
    moments.add_argument("--rate", type=float, help="requests a second, at random moments")
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args(argv)
    requests = trace_requests(args.trace, args.requests, TraceScale(lengths=args.lengths))
    if args.rate:
        args.concurrency = None
        at_random = poisson_requests(args.requests, args.rate, 1, 1, seed=0)
        requests = [replace(one, arrival=at.arrival) for one, at in zip(requests, at_random, strict=True)]
    rounds: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"QUIRE_RUN_DIR": folder}
        with stack(args, environment):
            os.environ["QUIRE_RUN_DIR"] = folder
            for number in range(args.rounds):
                rounds.append(measure(args, folder, requests, number))
                print(", ".join(f"{name} {value:.4g}" for name, value in rounds[-1].items()), file=sys.stderr)
    medians = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
    bars = {"throughput_bar": THROUGHPUT_BAR, "first_token_bar": FIRST_TOKEN_BAR}
    print(json.dumps(bars | medians | {"rounds": rounds}))
    is_close = abs(medians["throughput_ratio"] - 1) <= THROUGHPUT_BAR
    return 0 if is_close and abs(medians["ttft_p95_ratio"] - 1) <= FIRST_TOKEN_BAR else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
