"""What the drivers share. They run in the peers' own environments, so this needs the standard library only."""

import json
import sys
from collections.abc import Callable
from typing import Any


def arguments() -> tuple[str, dict[str, Any]]:
    """The model's path, and the load as JSON: batches, prompt, output, prefill, repeat, threads."""
    return sys.argv[1], json.loads(sys.argv[2])


def rates(seconds: Callable[[int, int, int], float], load: dict[str, Any]) -> dict[str, float]:
    """Tokens per second. `seconds(batch, prompt, new)` times one greedy run with that many tokens per sequence.

    Decoding is the difference of a long run and one that ends with the first token; of each, the fastest counts.
    """
    prompt, output, repeat = load["prompt"], load["output"], load["repeat"]
    figures = {}
    for batch in load["batches"]:
        seconds(batch, prompt, 2)  # the first run of a shape allocates and compiles
        first = min(seconds(batch, prompt, 1) for _ in range(repeat))
        whole = min(seconds(batch, prompt, output) for _ in range(repeat))
        figures[f"prefill {batch}x{prompt}"] = batch * prompt / first
        if whole > first:  # else the machine was too noisy to tell
            figures[f"decode {batch}"] = batch * (output - 1) / (whole - first)
    long = load["prefill"]
    seconds(1, long, 1)
    figures[f"prefill {long}"] = long / min(seconds(1, long, 1) for _ in range(repeat))
    return figures


def report(figures: dict[str, float], facts: dict[str, str]) -> None:
    """The last line of standard output."""
    print(json.dumps({"figures": figures, "facts": facts}), flush=True)
