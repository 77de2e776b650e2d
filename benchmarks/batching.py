"""Continuous against static batching on the real engine: what do rows cost that wait for the longest of their batch?

The same requests, with the lengths of a trace, go to one running stack in two ways, in turn:

- continuous: all at once; whoever ends makes room for the next;
- static: in groups as large as the batch, each asking for as many tokens as its longest row, one group after the other.

Only the tokens that were really wanted count. Beside it stands what the lengths and the engine's step times predict.

    python -m benchmarks.batching --trace conversations.csv --rounds 3
    python -m benchmarks.batching --trace conversations.csv --max-prompt-tokens 16

Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.stack import add_stack_flags, engine_flags, exit_on_failure, quire, stack
from quire.bench.clients import Client, GrpcClient, Manner
from quire.bench.load import closed_loop
from quire.bench.measures import Sample
from quire.bench.workload import Request, TraceScale, trace_requests
from quire.cli.common import gateway_address

BAR = 0.95
"""Of the predicted ratio."""
StepSeconds = Callable[[int], float]


def groups(requests: Sequence[Request], size: int) -> list[list[Request]]:
    """Static batches in the order of arrival, every row as long as the longest."""
    found = []
    for start in range(0, len(requests), size):
        rows = requests[start : start + size]
        longest = max(row.output_tokens for row in rows)
        found.append([dataclasses.replace(row, output_tokens=longest) for row in rows])
    return found


def static_seconds(batches: Sequence[Sequence[Request]], prefill: float, step: StepSeconds) -> float:
    """Computing time of static batches; `prefill` in tokens per second."""
    prompts = sum(row.prompt_tokens for rows in batches for row in rows)
    # The first token comes with the prompt.
    return prompts / prefill + sum((rows[0].output_tokens - 1) * step(len(rows)) for rows in batches)


def continuous_seconds(requests: Sequence[Request], size: int, prefill: float, step: StepSeconds) -> float:
    """Computing time where a row that ended is replaced at once, first come first served."""
    waiting = [request.output_tokens - 1 for request in reversed(requests)]
    rows: list[int] = []
    seconds = sum(request.prompt_tokens for request in requests) / prefill
    while waiting or rows:
        while waiting and len(rows) < size:
            rows.append(waiting.pop())
        rows = [left for left in rows if left > 0]
        if rows:
            shortest = min(rows)
            seconds += shortest * step(len(rows))
            rows = [left - shortest for left in rows]
    return seconds


def measured_steps(points: Sequence[dict[str, float]]) -> tuple[float, StepSeconds]:
    """Prefill tokens per second, and the seconds of a decode step by its rows, between the measured batch sizes."""
    known = sorted((int(point["batch"]), point["batch"] / point["decode_tok_s"]) for point in points)
    prefill = points[-1]["prefill_tok_s"]

    def step(rows: int) -> float:
        below = max((entry for entry in known if entry[0] <= rows), default=known[0])
        above = min((entry for entry in known if entry[0] >= rows), default=known[-1])
        if above[0] == below[0]:
            return below[1]
        return below[1] + (above[1] - below[1]) * (rows - below[0]) / (above[0] - below[0])

    return prefill, step


async def serve(address: str, batches: Sequence[Sequence[Request]], seed: int) -> float:
    """Seconds until all are answered, one batch after the other. Exits where a request failed."""
    samples: list[Sample] = []
    async with GrpcClient(address, Manner()) as client:
        started = time.monotonic()
        for rows in batches:
            await _send(client, rows, seed, samples)
        seconds = time.monotonic() - started
    exit_on_failure(samples)
    return seconds


async def _send(client: Client, rows: Sequence[Request], seed: int, samples: list[Sample]) -> None:
    await closed_loop(client, rows, len(rows), seed, samples.append)


def main(argv: Sequence[str]) -> int:
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_stack_flags(top)
    top.add_argument("--trace", type=Path, required=True, metavar="FILE", help="an Azure .csv or a Mooncake .jsonl")
    top.add_argument("--lengths", type=float, default=1 / 8, help="multiplies the trace's lengths (default: 1/8)")
    top.add_argument("--max-prompt-tokens", type=int, metavar="N", help="caps its prompts")
    top.add_argument("--requests", type=int, default=200)
    top.add_argument("--size", type=int, default=32, help="rows of a batch")
    top.add_argument("--rounds", type=int, default=3)
    args = top.parse_args(argv)
    scale = TraceScale(lengths=args.lengths, max_prompt_tokens=args.max_prompt_tokens)
    requests = trace_requests(args.trace, args.requests, scale)
    static = groups(requests, args.size)
    found: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as run_folder:
        environment = os.environ | {"QUIRE_RUN_DIR": run_folder, "QUIRE_EXECUTOR_MAX_SEQUENCES": str(args.size)}
        with stack(args, environment):
            os.environ.update(environment)
            address = gateway_address(args)
            for number in range(args.rounds):
                found.append(measure(args, environment, address, requests, static, number))
                print(", ".join(f"{name} {value:.4g}" for name, value in found[-1].items()), file=sys.stderr)
    medians = {name: statistics.median(one[name] for one in found) for name in found[0]}
    wanted = sum(request.output_tokens for request in requests)
    print(
        f"{len(requests)} requests, {wanted} output tokens: continuous {wanted / medians['continuous_s']:.0f} tok/s, "
        f"static {wanted / medians['static_s']:.0f} tok/s, {medians['ratio']:.2f} times as fast; "
        f"predicted {medians['predicted']:.2f}"
    )
    print(json.dumps({"bar": BAR, "rounds": found} | medians))
    return 0 if medians["of_predicted"] >= BAR else 1


def measure(
    args: argparse.Namespace,
    environment: dict[str, str],
    address: str,
    requests: Sequence[Request],
    static: Sequence[Sequence[Request]],
    number: int,
) -> dict[str, float]:
    """One round: the engine alone, continuous, static."""
    prompt = max(2, round(statistics.mean(request.prompt_tokens for request in requests)))
    batches = ",".join(str(size) for size in (1, 2, 4, 8, 16, 32, 64) if size <= args.size)
    engine = quire(
        *("bench", "engine", *engine_flags(args), "--batch", batches, "--prompt", str(prompt), "--json"),
        environment=environment,
    )
    prefill, step = measured_steps(engine["points"])
    continuous = asyncio.run(serve(address, [requests], 2 * number))  # a seed of its own: no prompt comes twice
    waiting = asyncio.run(serve(address, static, 2 * number + 1))
    predicted = static_seconds(static, prefill, step) / continuous_seconds(requests, args.size, prefill, step)
    return {
        "continuous_s": continuous,
        "static_s": waiting,
        "ratio": waiting / continuous,
        "predicted": predicted,
        "of_predicted": waiting / continuous / predicted,
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
