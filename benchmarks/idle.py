"""How long does the executor wait between steps for the scheduler, under load? By its own clock.

A closed loop keeps a full batch running; before and after, the executor's metrics tell what it spent on computing, on
building inputs and taking outputs apart, and on waiting although sequences were present.

    python -m benchmarks.idle [--concurrency 32] [--waves 4] [--rounds 2]

A round takes about a minute. The stack is started and stopped here, unless --address names a running one. Nothing else
should run meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import urllib.request
from collections.abc import Mapping, Sequence

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.stack import add_stack_flags, exit_on_failure, stack
from quire.bench.clients import GrpcClient, Manner
from quire.bench.load import closed_loop
from quire.bench.measures import Sample
from quire.bench.workload import fixed_requests
from quire.cli.common import gateway_address

BAR = 0.03
PARTS = {
    "compute": ("quire_executor_step_seconds_sum", {}),
    "steps": ("quire_executor_step_seconds_count", {}),
    "host": ("quire_executor_host_seconds_total", {}),
    "idle": ("quire_executor_idle_seconds_total", {"sequences": "present"}),
}


def totals(url: str) -> dict[str, float]:
    """What the executor counted so far."""
    with urllib.request.urlopen(url, timeout=10) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    found = {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}
    return {part: found[name, tuple(sorted(labels.items()))] for part, (name, labels) in PARTS.items()}


def idle_share(spent: Mapping[str, float]) -> float:
    """Of the time in which sequences were present."""
    return spent["idle"] / (spent["idle"] + spent["compute"] + spent["host"])


async def load(address: str, args: argparse.Namespace, number: int) -> None:
    """Keeps the batch full; a seed of its own in each round, so that no prompt comes twice."""
    requests = fixed_requests(args.waves * args.concurrency, args.prompt, args.output)
    samples: list[Sample] = []
    async with GrpcClient(address, Manner()) as client:
        await closed_loop(client, requests, args.concurrency, number, samples.append)
    exit_on_failure(samples)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_stack_flags(parser)
    parser.add_argument("--metrics", default="http://127.0.0.1:9104/metrics", help="of the executor")
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--waves", type=int, default=4, help="requests per unit of concurrency")
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args(argv)
    rounds = []
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"QUIRE_RUN_DIR": folder}
        with stack(args, environment):
            os.environ["QUIRE_RUN_DIR"] = folder
            address = gateway_address(args)
            for number in range(args.rounds):
                before = totals(args.metrics)
                asyncio.run(load(address, args, number))
                after = totals(args.metrics)
                rounds.append({part: after[part] - before[part] for part in PARTS})
    shares = [idle_share(spent) for spent in rounds]
    for spent, share in zip(rounds, shares, strict=True):
        print(
            f"{spent['steps']:.0f} steps: computing {spent['compute']:.2f} s, inputs and outputs {spent['host']:.2f} s,"
            f" idle {spent['idle']:.3f} s, {share:.2%}"
        )
    print(json.dumps({"concurrency": args.concurrency, "bar": BAR, "idle_share": statistics.median(shares)}))
    return 0 if statistics.median(shares) <= BAR else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
