"""What does speculation gain, and does it ever cost? One running stack, asked the same with every draft limit in turn.

    python -m benchmarks.speculation --rounds 5                      # one request at a time
    python -m benchmarks.speculation --at-once 8,32 --kinds mixed --rounds 3 --output 64 --json found.json
    python -m benchmarks.speculation --draft early-exit:8

Each round asks all prompts of a kind once for every arm: without drafts, with the controller's choice, with fixed
limits. Prompts are cached before, so that decoding is what is measured; texts must be equal whatever the arm. One
request at a time, arms take turns prompt by prompt, and what counts is the time from each first token to the last one.
Several at once, arms take turns set by set; answers are of half to one and a half times the length, so that they do
not all begin and end together; and what counts is the time in which as many requests run as shall: from the first
token of the first ones until there is no further request for one that ended. Arms begin in another order each time, so
that all see the same machine. Ratios are of one round each; intervals are of their mean at 95%. Nothing else should
run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.stack import add_stack_flags, stack
from quire.cli.common import gateway_address
from quire.client import Client, Prompt

ARMS = ("off", "auto", "2", "4", "8")
BARS = {"copy": 1.6, "chat": 1.05, "random": 0.98}
"""Of `auto` against `off`, one request at a time."""
BATCH_BAR, FIXED_BAR = 0.98, 0.97
"""Of `auto` against `off` and against the best fixed limit, in any batch."""
RANDOM_PROMPTS, RANDOM_TOKENS, VOCAB = 8, 64, 49_000
TEXTS = Path(__file__).with_name("speculation_texts.json")
"""Prompts whose answers copy from them, and ordinary questions."""


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt and how its answer is drawn: greedily, or with a seed."""

    prompt: Prompt
    temperature: float = 0.0
    seed: int = 0


@dataclass
class Arm:
    """Output tokens per second, by round."""

    rates: list[float] = field(default_factory=list)


def questions(kind: str) -> list[Question]:
    if kind == "mixed":
        return [question for part in BARS for question in questions(part)]
    if kind == "random":
        draw = random.Random(1)
        prompts = [[draw.randrange(VOCAB) for _ in range(RANDOM_TOKENS)] for _ in range(RANDOM_PROMPTS)]
        return [Question(ids, 1.0, seed) for seed, ids in enumerate(prompts)]
    return [Question([{"role": "user", "content": text}]) for text in json.loads(TEXTS.read_text())[kind]]


T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
"""Student's t, two-sided at 95%, by degrees of freedom from 1; the last for all further ones."""


@dataclass
class Heard:
    """One answer, and when its tokens came."""

    ids: list[int]
    arrivals: list[tuple[float, int]]  # time, tokens
    started: float


def ask(client: Client, question: Question, arm: str, tokens: int) -> Heard:
    heard = Heard([], [], time.perf_counter())
    for piece in client.stream(
        question.prompt,
        temperature=question.temperature,
        seed=question.seed,
        max_tokens=tokens,
        ignore_eos=True,
        speculation=arm,
    ):
        if piece.token_ids:
            heard.ids += piece.token_ids
            heard.arrivals.append((time.perf_counter(), len(piece.token_ids)))
    return heard


def run_alone(
    client: Client, asked: Sequence[Question], arms: Sequence[str], turn: int, tokens: int
) -> dict[str, tuple[float, list[list[int]]]]:
    """Output tokens per second while decoding, and all answers, of each arm; questions are asked with all in turn."""
    heard: dict[str, list[Heard]] = {arm: [] for arm in arms}
    for number, question in enumerate(asked, turn):
        for arm in in_turn(arms, number):
            heard[arm].append(ask(client, question, arm, tokens))
    return {arm: (alone_rate(of), [one.ids for one in of]) for arm, of in heard.items()}


def alone_rate(heard: Sequence[Heard]) -> float:
    """Tokens per second after the first message of each answer."""
    return sum(len(one.ids) - one.arrivals[0][1] for one in heard) / sum(
        one.arrivals[-1][0] - one.arrivals[0][0] for one in heard
    )


def run_together(
    client: Client, asked: Sequence[Question], arms: Sequence[str], turn: int, at_once: int, tokens: int
) -> dict[str, tuple[float, list[list[int]]]]:
    """The same of all questions with one arm after the other, `at_once` of them at any time."""
    return {arm: run(client, asked, arm, at_once, tokens) for arm in in_turn(arms, turn)}


def in_turn(arms: Sequence[str], turn: int) -> list[str]:
    """All arms, another one first each turn."""
    first = turn % len(arms)
    return [*arms[first:], *arms[:first]]


def run(
    client: Client, asked: Sequence[Question], arm: str, at_once: int, tokens: int
) -> tuple[float, list[list[int]]]:
    """Output tokens per second while all places are taken, and all answers."""
    draw = random.Random(at_once)
    lengths = [draw.randint(max(tokens // 2, 2), tokens * 3 // 2) for _ in asked]
    with ThreadPoolExecutor(at_once) as pool:
        heard = list(pool.map(lambda question, length: ask(client, question, arm, length), asked, lengths))
    return rate(heard, at_once), [one.ids for one in heard]


def rate(heard: Sequence[Heard], at_once: int) -> float:
    """Tokens per second from when the first `at_once` requests have a token until one ends that no other follows."""
    begin = max(one.arrivals[0][0] for one in heard[:at_once])
    last_start = max(one.started for one in heard)
    end = min(one.arrivals[-1][0] for one in heard if one.arrivals[-1][0] > last_start)
    came = sum(count for one in heard for at, count in one.arrivals if begin < at <= end)
    return came / (end - begin)


def measure(client: Client, kind: str, at_once: int, arms: Sequence[str], rounds: int, tokens: int) -> dict[str, Arm]:
    """All arms in turn, round by round. Exits where an answer is not that of the other arms."""
    found = {arm: Arm() for arm in arms}
    asked = questions(kind)
    while len(asked) < 3 * at_once:
        asked += questions(kind)
    run(client, asked, "off", at_once, 2)
    expected: list[list[int]] | None = None
    for number in range(rounds):
        if at_once == 1:
            heard = run_alone(client, asked, arms, number, tokens)
        else:
            heard = run_together(client, asked, arms, number, at_once, tokens)
        for arm, (speed, answers) in heard.items():
            found[arm].rates.append(speed)
            expected = expected or answers
            if answers != expected:
                sys.exit(f"{kind}: an answer differs with speculation={arm}")
    return found


def ratios(arms: dict[str, Arm], one: str, other: str) -> list[float]:
    return [a / b for a, b in zip(arms[one].rates, arms[other].rates, strict=True)]


@dataclass(frozen=True, slots=True)
class Interval:
    """Of a ratio: the geometric mean over rounds, and where it lies with 95%."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Interval:
        logs = [math.log(value) for value in values]
        mean = statistics.fmean(logs)
        half = math.inf
        if len(logs) > 1:
            half = T95[min(len(logs) - 2, len(T95) - 1)] * statistics.stdev(logs) / math.sqrt(len(logs))
        return cls(math.exp(mean), math.exp(mean - half), math.exp(min(mean + half, 700.0)))


def report(kind: str, at_once: int, arms: dict[str, Arm]) -> str:
    lines = [f"{kind}, {at_once} at once"]
    for name, arm in arms.items():
        of_off = Interval.of(ratios(arms, name, "off"))
        lines.append(
            f"  {name:>5}{statistics.median(arm.rates):>9.1f} tok/s{of_off.mean:>8.3f} of off"
            f" ({of_off.low:.3f} to {of_off.high:.3f})"
        )
    best = best_fixed(arms)
    share = Interval.of(ratios(arms, "auto", best))
    lines.append(f"  auto is {share.mean:.3f} ({share.low:.3f} to {share.high:.3f}) of the best fixed, {best}")
    return "\n".join(lines)


def best_fixed(arms: dict[str, Arm]) -> str:
    return max((name for name in arms if name != "auto"), key=lambda name: statistics.median(arms[name].rates))


def falls_short(kind: str, at_once: int, arms: dict[str, Arm]) -> list[str]:
    """Which bars are missed."""
    gain, best = Interval.of(ratios(arms, "auto", "off")).mean, best_fixed(arms)
    bar = BARS.get(kind, BATCH_BAR) if at_once == 1 else BATCH_BAR
    missed = [f"{kind} at {at_once}: auto is {gain:.3f} of off, not {bar}"] if gain < bar else []
    share = Interval.of(ratios(arms, "auto", best)).mean
    if share < FIXED_BAR:
        missed.append(f"{kind} at {at_once}: auto is {share:.3f} of {best}, not {FIXED_BAR}")
    return missed


def main(argv: Sequence[str]) -> int:
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_stack_flags(top)
    top.add_argument("--draft", default="ngram", help="as of quire up")
    top.add_argument("--kinds", type=lambda text: text.split(","), default=["copy", "chat", "random"])
    top.add_argument("--arms", type=lambda text: text.split(","), default=list(ARMS), help="off and auto among them")
    top.add_argument("--at-once", type=lambda text: [int(part) for part in text.split(",")], default=[1])
    top.add_argument("--output", type=int, default=128)
    top.add_argument("--rounds", type=int, default=5)
    top.add_argument("--json", type=Path, metavar="FILE", help="where to put all figures")
    args = top.parse_args(argv)
    missed: list[str] = []
    points: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as run_folder:
        os.environ["QUIRE_RUN_DIR"] = run_folder
        with stack(args, dict(os.environ), "--draft", args.draft), Client(gateway_address(args)) as client:
            for kind in args.kinds:
                for at_once in args.at_once:
                    arms = measure(client, kind, at_once, args.arms, args.rounds, args.output)
                    print(report(kind, at_once, arms), flush=True)
                    missed += falls_short(kind, at_once, arms)
                    against = {name: asdict(Interval.of(ratios(arms, name, "off"))) for name in arms}
                    rates = {name: arm.rates for name, arm in arms.items()}
                    points.append({"kind": kind, "at_once": at_once, "of_off": against, "tok_s": rates})
    print("\n".join(missed) or "every bar is met")
    found = json.dumps({"model": args.model, "draft": args.draft, "points": points})
    if args.json is not None:
        args.json.write_text(found)
    else:
        print(found)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
