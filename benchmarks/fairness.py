"""Two tenants on the real engine, one of them flooding: does the other one notice?

The light tenant asks at random moments, at half of what the stack can answer: first alone, then while another tenant
keeps a flood of requests waiting. Its first tokens should come nearly as soon. Then both keep a backlog, the flooding
one ten times as long, and the tokens that each was served are compared over every window: Jain's index.

    python -m benchmarks.fairness [--seconds 30] [--plot fairness.png]

Takes about two minutes. The stack is started and stopped here. Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.stack import add_stack_flags, quire, stack
from quire.bench.clients import Ask, GrpcClient, Manner
from quire.bench.load import open_loop
from quire.bench.measures import Sample, percentile
from quire.bench.workload import Request, poisson_requests, prompt_text
from quire.cli.common import gateway_address
from quire.simulation.fairness import jain

FIRST_TOKEN_BAR, JAIN_BAR = 1.5, 0.95
WINDOW_SECONDS = 10.0
ANSWER_SECONDS = 10.0
"""Longer than an answer takes once it began: tokens of answers that never ended are not counted."""
TENANTS = ("light", "flood")


class Tenant:
    """Asks with a key of its own; no prompt comes twice."""

    def __init__(self, address: str, key: str, args: argparse.Namespace, numbers: Iterator[int]) -> None:
        self._client = GrpcClient(address, Manner(api_keys=(key,)))
        self._args, self._numbers = args, numbers
        self.samples: list[Sample] = []

    async def flood(self, backlog: int) -> None:
        """Keeps so many requests open until it is cancelled."""

        async def user() -> None:
            for number in self._numbers:
                request = Request(number, 0.0, self._args.prompt, self._args.output)
                self._take(await client.ask(Ask(prompt_text(request, seed=1), self._args.output, time.monotonic())))

        async with self._client as client, asyncio.TaskGroup() as users:
            for _ in range(backlog):
                users.create_task(user())

    async def ask_at(self, rate: float, seconds: float) -> None:
        """Asks at random moments and waits for the answers."""
        count = max(2, round(rate * seconds))
        first = next(self._numbers)
        async with self._client as client:
            requests = poisson_requests(count, rate, self._args.prompt, self._args.output, seed=first)
            await open_loop(client, requests, first, self._take)

    def _take(self, sample: Sample) -> None:
        if sample.error is not None:
            raise RuntimeError(f"a request failed: {sample.error}")
        self.samples.append(sample)

    def first_token_p99(self) -> float:
        """Milliseconds."""
        return percentile([sample.arrivals[0] - sample.start for sample in self.samples], 99) * 1e3


async def beside(flood: Awaitable[None], rest: Awaitable[None], warm_up: float) -> None:
    """Does `rest` while the flood, which began `warm_up` seconds before, goes on."""
    flooding = asyncio.ensure_future(flood)
    try:
        await asyncio.sleep(warm_up)
        if flooding.done():
            flooding.result()
        await rest
    finally:
        flooding.cancel()
        await asyncio.wait({flooding})


def served(samples: Sequence[Sample], begin: float, end: float) -> int:
    """Tokens of prompts and answers: a prompt counts when its first token comes."""
    tokens = 0
    for sample in samples:
        for index, (at, count) in enumerate(zip(sample.arrivals, sample.token_counts, strict=True)):
            if begin <= at < end:
                tokens += count + (sample.prompt_tokens if index == 0 else 0)
    return tokens


def windows(tenants: Sequence[Sequence[Sample]], begin: float, end: float) -> list[list[int]]:
    """What each tenant was served in every window that slides by a second."""
    starts = itertools.takewhile(lambda start: start + WINDOW_SECONDS <= end, itertools.count(begin))
    return [[served(samples, start, start + WINDOW_SECONDS) for samples in tenants] for start in starts]


async def measure(args: argparse.Namespace, address: str, keys: Sequence[str]) -> dict[str, Any]:
    """All parts, one after the other."""
    numbers = itertools.count()

    def tenant(name: str) -> Tenant:
        return Tenant(address, keys[TENANTS.index(name)], args, numbers)

    probe = tenant("light")
    begin = time.monotonic()
    await beside(probe.flood(args.backlog), asyncio.sleep(args.seconds / 2), 0)
    rate = len(probe.samples) / (time.monotonic() - begin) / 2

    alone, beside_flood = tenant("light"), tenant("light")
    await alone.ask_at(rate, args.seconds)
    await beside(tenant("flood").flood(10 * args.backlog), beside_flood.ask_at(rate, args.seconds), 3)

    both = [tenant("light"), tenant("flood")]
    begin = time.monotonic() + 3
    waiting = asyncio.sleep(args.seconds + ANSWER_SECONDS)
    await beside(both[1].flood(10 * args.backlog), beside(both[0].flood(args.backlog), waiting, 0), 1)
    shares = windows([one.samples for one in both], begin, begin + args.seconds)
    return {
        "light_request_s": rate,
        "light_requests": len(alone.samples),
        "ttft_p99_alone_ms": alone.first_token_p99(),
        "ttft_p99_beside_ms": beside_flood.first_token_p99(),
        "ttft_ratio": beside_flood.first_token_p99() / alone.first_token_p99(),
        "jain_worst": min(map(jain, shares)),
        "windows": shares,
    }


def draw(found: dict[str, Any], path: Path) -> None:
    """Tokens that each tenant was served, window by window."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3), layout="constrained")
    axes = figure.subplots()
    for name, column in zip(TENANTS, zip(*found["windows"], strict=True), strict=True):
        axes.plot([tokens / WINDOW_SECONDS for tokens in column], label=name)
    axes.set(xlabel="seconds", ylabel=f"tokens/s over {WINDOW_SECONDS:g} s", ylim=(0, None))
    axes.legend()
    figure.savefig(path, dpi=110)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_stack_flags(parser)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--output", type=int, default=32)
    parser.add_argument("--backlog", type=int, default=64, help="requests that the light tenant keeps waiting")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each part")
    parser.add_argument("--plot", type=Path, metavar="FILE.png")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        environment, keys = os.environ | {"QUIRE_RUN_DIR": folder}, Path(folder) / "keys.toml"
        create = ("keys", "create", "--keys", str(keys), "--json")
        made = [quire(*create, tenant, environment=environment) for tenant in TENANTS]
        with stack(args, environment | {"QUIRE_API_KEY": made[0]["key"]}, "--keys", str(keys)):
            os.environ["QUIRE_RUN_DIR"] = folder
            found = asyncio.run(measure(args, gateway_address(args), [one["key"] for one in made]))
    if args.plot:
        draw(found, args.plot)
    print(json.dumps({"first_token_bar": FIRST_TOKEN_BAR, "jain_bar": JAIN_BAR} | found))
    met = found["ttft_ratio"] <= FIRST_TOKEN_BAR and found["jain_worst"] >= JAIN_BAR
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
