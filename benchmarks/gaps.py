"""Do long prompts that keep arriving hold up who is reading, and are they held up themselves?

Streams of short prompts run side by side, once alone and once while prompts of 2,048 tokens arrive one behind the
other. What counts are the gaps between the streams' tokens and the rate at which the prompts are computed, against
that of prompts that have the server for themselves; all from the clients' side.

    python -m benchmarks.gaps [--streams 8] [--prompt 2048] [--rounds 2]
    python -m benchmarks.gaps --peer Q4_1     # llama-server under the same load, installed by `make bench-peers`

A round takes about half a minute. The stack is started and stopped here, unless --address names a running one. Nothing
else should run meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.contestants import START_SECONDS, Conditions
from benchmarks.peers.llama_cpp import llama_cpp
from benchmarks.peers.processes import serving
from benchmarks.stack import add_stack_flags, stack
from quire.bench.clients import Ask, Client, GrpcClient, Manner, OpenAIClient
from quire.bench.measures import Sample, message_gaps, percentile, token_gaps
from quire.bench.workload import Request, prompt_text
from quire.cli.common import gateway_address

GAP_BAR, RATE_BAR = 3.0, 0.5
STREAM_PROMPT = 32  # tokens
QUIET_PROMPTS = 3
PEER_PORT = 50_900


@dataclass(frozen=True, slots=True)
class Seen:
    """What the clients of one part saw. Gaps in milliseconds."""

    token_gap_p50: float
    token_gap_p99: float
    message_gap_p99: float
    prompt_rate: float  # tokens per second


class Load:
    """Asks one server; no prompt comes twice, for `numbers` goes on from round to round."""

    def __init__(self, client: Client, args: argparse.Namespace, numbers: Iterator[int]) -> None:
        self._client, self._args, self._numbers = client, args, numbers

    async def ask(self, prompt: int, output: int) -> Sample:
        text = prompt_text(Request(next(self._numbers), 0.0, prompt, output), seed=9)
        sample = await self._client.ask(Ask(text, output, time.monotonic()))
        if sample.error is not None:
            raise RuntimeError(f"a request failed: {sample.error}")
        return sample

    async def quiet_rate(self) -> float:
        """Tokens per second of prompts that have the server for themselves."""
        rates = []
        for _ in range(QUIET_PROMPTS):
            sample = await self.ask(self._args.prompt, 1)
            rates.append(sample.prompt_tokens / (sample.arrivals[0] - sample.start))
        return statistics.median(rates)

    async def streams(self) -> list[Sample]:
        return await asyncio.gather(*(self.ask(STREAM_PROMPT, self._args.output) for _ in range(self._args.streams)))

    async def beside_prompts(self) -> tuple[list[Sample], list[Sample]]:
        """The streams, and the prompts that ended while all of them ran."""
        prompts: list[Sample] = []

        async def keep_asking() -> None:
            while True:
                prompts.append(await self.ask(self._args.prompt, 1))

        asking = asyncio.create_task(keep_asking())
        try:
            return await self.streams(), prompts
        finally:
            asking.cancel()
            await asyncio.wait({asking})


def seen(streams: Sequence[Sample], prompts: Sequence[Sample]) -> Seen:
    """Of the time in which all streams ran."""
    begin = max(sample.arrivals[0] for sample in streams)
    end = min(sample.arrivals[-1] for sample in streams)
    cut = [_between(sample, begin, end) for sample in streams]
    tokens = [gap * 1e3 for sample in cut for gap in token_gaps(sample)]
    messages = [gap * 1e3 for sample in cut for gap in message_gaps(sample)]
    counted = [sample for sample in prompts if sample.start >= begin and sample.end <= end]
    busy = sum(sample.end - sample.start for sample in counted)
    rate = sum(sample.prompt_tokens for sample in counted) / busy if counted else 0.0
    return Seen(percentile(tokens, 50), percentile(tokens, 99), percentile(messages, 99), rate)


def _between(sample: Sample, begin: float, end: float) -> Sample:
    """The messages of that time. Where the API does not count tokens, each brought as many as any other."""
    counts = sample.token_counts or [sample.output_tokens / len(sample.arrivals)] * len(sample.arrivals)
    kept = [(at, count) for at, count in zip(sample.arrivals, counts, strict=True) if begin <= at <= end]
    return Sample(sample.start, [at for at, _ in kept], [count for _, count in kept])


async def measure(client: Client, args: argparse.Namespace, numbers: Iterator[int]) -> dict[str, float]:
    """One round."""
    async with client:
        load = Load(client, args, numbers)
        await load.ask(STREAM_PROMPT, 8)  # what is slow at first is not what is measured
        quiet_rate = await load.quiet_rate()
        alone = seen(await load.streams(), ())
        beside = seen(*await load.beside_prompts())
    return {
        "gap_p50_alone_ms": alone.token_gap_p50,
        "gap_p99_alone_ms": alone.token_gap_p99,
        "gap_p50_ms": beside.token_gap_p50,
        "gap_p99_ms": beside.token_gap_p99,
        "gap_ratio": beside.token_gap_p99 / alone.token_gap_p99,
        "message_gap_ratio": beside.message_gap_p99 / alone.message_gap_p99,
        "prompt_rate_alone": quiet_rate,
        "prompt_rate": beside.prompt_rate,
        "rate_share": beside.prompt_rate / quiet_rate,
    }


@contextmanager
def peer(weights: str, args: argparse.Namespace, logs: Path) -> Iterator[str]:
    """llama-server with room for the streams and a prompt; its base URL."""
    cpus = tuple(sorted(os.sched_getaffinity(0)))
    found = llama_cpp(Conditions(cpus, logs, PEER_PORT), weights)
    slots = args.streams + 1
    command: list[str | Path] = [found.tools / "llama-server", "-m", str(found.model), "-t", str(len(cpus))]
    command += ["--host", "127.0.0.1", "--port", str(PEER_PORT), "-np", str(slots)]
    command += ["-c", str(slots * (args.prompt + args.output + 256))]
    base = f"http://127.0.0.1:{PEER_PORT}"
    with serving(command, f"{base}/health", logs / "llama-server.log", START_SECONDS):
        yield f"{base}/v1"


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_stack_flags(parser)
    parser.add_argument("--peer", metavar="WEIGHTS", help="measures llama-server instead, for example with Q4_1")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of those that keep arriving")
    parser.add_argument("--output", type=int, default=400, help="tokens of each stream")
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args(argv)
    rounds = []
    numbers = itertools.count()
    with tempfile.TemporaryDirectory() as folder:
        if args.peer:
            with peer(args.peer, args, Path(folder)) as base_url:
                for _ in range(args.rounds):
                    client = OpenAIClient(base_url, Manner(), args.streams + 1)
                    rounds.append(asyncio.run(measure(client, args, numbers)))
        else:
            environment = os.environ | {"QUIRE_RUN_DIR": folder}
            with stack(args, environment):
                os.environ["QUIRE_RUN_DIR"] = folder
                address = gateway_address(args)
                for _ in range(args.rounds):
                    rounds.append(asyncio.run(measure(GrpcClient(address, Manner()), args, numbers)))
    medians = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
    for name, value in medians.items():
        low, high = min(one[name] for one in rounds), max(one[name] for one in rounds)
        print(f"{name:20}{value:10.2f}   {low:.2f} to {high:.2f}")
    print(json.dumps({"server": args.peer or "quire", "gap_bar": GAP_BAR, "rate_bar": RATE_BAR, **medians}))
    met = medians["gap_ratio"] <= GAP_BAR and medians["rate_share"] >= RATE_BAR
    return 0 if met or args.peer else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
