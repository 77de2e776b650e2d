"""What does speculation gain, and does it ever cost? One running stack, asked the same with every draft limit in turn.

    python -m benchmarks.speculation --rounds 5                      # one request at a time
    python -m benchmarks.speculation --at-once 1,8,32 --kinds chat,mixed
    python -m benchmarks.speculation --draft early-exit:8

Each round asks all prompts of a kind once for every arm: without drafts, with the controller's choice, with fixed
limits. Arms begin in another order each round, so that all see the same machine. Prompts are cached before, so that
decoding is what is measured; texts must be equal whatever the arm. Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
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


def ask(client: Client, question: Question, arm: str, tokens: int) -> tuple[int, ...]:
    """The answer's token ids."""
    ids: list[int] = []
    for piece in client.stream(
        question.prompt,
        temperature=question.temperature,
        seed=question.seed,
        max_tokens=tokens,
        ignore_eos=True,
        speculation=arm,
    ):
        ids += piece.token_ids
    return tuple(ids)


def run(client: Client, asked: Sequence[Question], arm: str, at_once: int, tokens: int) -> tuple[float, list[object]]:
    """Output tokens per second over all questions, and their answers."""
    started = time.perf_counter()
    with ThreadPoolExecutor(at_once) as pool:
        answers = list(pool.map(lambda question: ask(client, question, arm, tokens), asked))
    seconds = time.perf_counter() - started
    return sum(map(len, answers)) / seconds, list(answers)


def measure(client: Client, kind: str, at_once: int, arms: Sequence[str], rounds: int, tokens: int) -> dict[str, Arm]:
    """All arms in turn, round by round. Exits where an answer is not that of the other arms."""
    found = {arm: Arm() for arm in arms}
    asked = questions(kind)
    while len(asked) < 2 * at_once:
        asked += questions(kind)
    _, expected = run(client, asked, "off", at_once, 1)
    _, expected = run(client, asked, "off", at_once, tokens)
    for number in range(rounds):
        for place in range(len(arms)):
            arm = arms[(number + place) % len(arms)]
            rate, answers = run(client, asked, arm, at_once, tokens)
            found[arm].rates.append(rate)
            if answers != expected:
                sys.exit(f"{kind}: an answer differs with speculation={arm}")
    return found


def ratios(arms: dict[str, Arm], one: str, other: str) -> list[float]:
    return [a / b for a, b in zip(arms[one].rates, arms[other].rates, strict=True)]


def report(kind: str, at_once: int, arms: dict[str, Arm]) -> str:
    lines = [f"{kind}, {at_once} at once"]
    for name, arm in arms.items():
        against = ratios(arms, name, "off")
        lines.append(
            f"  {name:>5}{statistics.median(arm.rates):>9.1f} tok/s{statistics.median(against):>8.3f}"
            f"{f'{min(against):.3f}-{max(against):.3f}':>15}"
        )
    return "\n".join(lines)


def falls_short(kind: str, at_once: int, arms: dict[str, Arm]) -> list[str]:
    """Which bars are missed."""
    gain = statistics.median(ratios(arms, "auto", "off"))
    bar = BARS.get(kind, BATCH_BAR) if at_once == 1 else BATCH_BAR
    missed = [f"{kind} at {at_once}: auto is {gain:.3f} of off, not {bar}"] if gain < bar else []
    best = max((name for name in arms if name != "auto"), key=lambda name: statistics.median(arms[name].rates))
    share = statistics.median(ratios(arms, "auto", best))
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
    args = top.parse_args(argv)
    missed: list[str] = []
    medians: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as run_folder:
        os.environ["QUIRE_RUN_DIR"] = run_folder
        with stack(args, dict(os.environ), "--draft", args.draft), Client(gateway_address(args)) as client:
            for kind in args.kinds:
                for at_once in args.at_once:
                    arms = measure(client, kind, at_once, args.arms, args.rounds, args.output)
                    print(report(kind, at_once, arms), flush=True)
                    missed += falls_short(kind, at_once, arms)
                    medians[f"{kind} {at_once}"] = {
                        name: round(statistics.median(ratios(arms, name, "off")), 3) for name in arms
                    }
    print("\n".join(missed) or "every bar is met")
    print(json.dumps({"model": args.model, "draft": args.draft, "of_off": medians}))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
