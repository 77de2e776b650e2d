"""The whole stack against its own engine: what do four services cost?

Each round measures, one after the other, the engine alone and the served model at each concurrency, so that both see
the same machine. The bound is N / (P / prefill_tok_s + N / decode_tok_s) for P prompt and N output tokens.

    python benchmarks/stack.py --model smollm2 --rounds 5

Nothing else should run meanwhile. The stack is started and stopped here, unless --address names a running one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from quire.bench.measures import Sample, engine_bound

BAR = 0.85  # of the bound
LEAST_REQUESTS = 8


@dataclass
class Point:
    """What the rounds found at one concurrency, in output tokens per second."""

    bounds: list[float] = field(default_factory=list)
    served: list[float] = field(default_factory=list)
    ttft_ms: list[float] = field(default_factory=list)
    itl_ms: list[float] = field(default_factory=list)

    @property
    def ratios(self) -> list[float]:
        return [served / bound for served, bound in zip(self.served, self.bounds, strict=True)]


def quire(*args: str, environment: dict[str, str]) -> dict[str, Any]:
    """Runs a quire command and reads the JSON of its last line."""
    done = subprocess.run(
        [sys.executable, "-m", "quire.cli", *args], env=environment, stdout=subprocess.PIPE, text=True, check=False
    )
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        sys.exit(f"quire {' '.join(args)} ended with {done.returncode}\n{done.stdout}")
    answer: dict[str, Any] = json.loads(lines[-1])
    return answer


@contextmanager
def stack(args: argparse.Namespace, environment: dict[str, str], *flags: str) -> Iterator[None]:
    """A running stack of the given model, with these flags of `quire up`; the user's own where an address is given."""
    if args.address:
        environment["QUIRE_ADDRESS"] = args.address
        yield
        return
    command = [sys.executable, "-m", "quire.cli"]
    subprocess.run([*command, "up", "--detach", *engine_flags(args), *flags], env=environment, check=True)
    try:
        yield
    finally:
        subprocess.run([*command, "down"], env=environment, check=True)


def exit_on_failure(samples: Iterable[Sample]) -> None:
    """What was measured counts only where every request was answered."""
    if failed := [sample.error for sample in samples if sample.error is not None]:
        sys.exit(f"{len(failed)} requests failed: {failed[0]}")


def add_stack_flags(parser: argparse.ArgumentParser) -> None:
    """What `stack` takes."""
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--backend")
    parser.add_argument("--dtype")
    parser.add_argument("--address", help="of a running gateway that serves the same model")


def engine_flags(args: argparse.Namespace) -> list[str]:
    flags = ["--model", args.model]
    for name in ("backend", "dtype"):
        if value := getattr(args, name):
            flags += [f"--{name}", value]
    return flags


def measure(args: argparse.Namespace, environment: dict[str, str]) -> dict[int, Point]:
    points = {concurrency: Point() for concurrency in args.concurrency}
    lengths = ["--prompt-tokens", str(args.prompt), "--output-tokens", str(args.output)]
    for round_number in range(args.rounds):
        engine = quire(
            *("bench", "engine", *engine_flags(args), "--batch", ",".join(map(str, points)), "--json"),
            *("--prompt", str(args.prompt), "--output", str(args.output)),
            environment=environment,
        )
        rates = {point["batch"]: point for point in engine["points"]}
        for index, (concurrency, point) in enumerate(points.items()):
            # Seeds that no other run on this stack has (one run takes two): a cached prompt is not what is measured.
            seed = 2 * (len(points) * round_number + index)
            report = quire(
                *("bench", "serve", "--concurrency", str(concurrency), "--json", *lengths),
                *("--requests", str(max(LEAST_REQUESTS, args.waves * concurrency)), "--warmup", str(concurrency)),
                *("--seed", str(seed)),
                environment=environment,
            )
            if report["errors"]:
                sys.exit(f"requests failed at concurrency {concurrency}: {report['error_kinds']}")
            prompt = report["prompt_tokens"] / report["requests"]
            rate = rates[concurrency]
            point.bounds.append(engine_bound(prompt, args.output, rate["prefill_tok_s"], rate["decode_tok_s"]))
            point.served.append(report["output_tok_s"])
            point.ttft_ms.append(report["ttft_ms"]["p50"])
            point.itl_ms.append(report["itl_ms"]["p50"])
    return points


def table(points: dict[int, Point]) -> str:
    """Medians of the rounds, with the range of the ratio."""
    lines = [
        f"{'at once':>8}{'bound tok/s':>13}{'served tok/s':>14}{'ratio':>8}{'range':>14}{'ttft ms':>9}{'itl ms':>8}"
    ]
    for concurrency, point in points.items():
        ratios = point.ratios
        lines.append(
            f"{concurrency:>8}{statistics.median(point.bounds):>13.1f}{statistics.median(point.served):>14.1f}"
            f"{statistics.median(ratios):>8.3f}{f'{min(ratios):.3f}-{max(ratios):.3f}':>14}"
            f"{statistics.median(point.ttft_ms):>9.1f}{statistics.median(point.itl_ms):>8.2f}"
        )
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_stack_flags(top)
    top.add_argument("--concurrency", type=lambda text: [int(part) for part in text.split(",")], default=[1, 8, 32])
    top.add_argument("--prompt", type=int, default=128)
    top.add_argument("--output", type=int, default=64)
    top.add_argument("--waves", type=int, default=3, help="requests per unit of concurrency")
    top.add_argument("--rounds", type=int, default=5)
    args = top.parse_args(argv)
    with tempfile.TemporaryDirectory() as run_folder:
        environment = os.environ | {"QUIRE_RUN_DIR": run_folder}
        with stack(args, environment):
            points = measure(args, environment)
    print(table(points))
    medians = {str(concurrency): statistics.median(point.ratios) for concurrency, point in points.items()}
    print(json.dumps({"model": args.model, "bar": BAR, "ratios": medians}))
    return 0 if min(medians.values()) >= BAR else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
