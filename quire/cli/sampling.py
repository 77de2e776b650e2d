"""The generation flags that `quire generate` and `quire chat` share."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

from quire.v1 import types_pb2

TEMPERATURE = 0.7
"""Where the model states none. At the API's own default, 1, small models ramble."""


def add_sampling(to: argparse.ArgumentParser, *, max_tokens: int) -> None:
    """Flags for the model and how to sample; the server checks the values."""
    to.add_argument("--model", default="", help="model name (default: the only one)")
    to.add_argument("--max-tokens", type=int, default=max_tokens, help=f"longest answer (default: {max_tokens})")
    to.add_argument(
        "--temperature",
        type=float,
        help=f"0 always takes the likeliest token (default: the model's own, else {TEMPERATURE})",
    )
    to.add_argument("--top-p", type=float, help="sample among the likeliest tokens of this total probability")
    to.add_argument("--top-k", type=int, help="sample among this many likeliest tokens")
    to.add_argument("--seed", type=int, help="equal seeds give equal answers")
    to.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeatable")
    to.add_argument("--speculation", metavar="K", help="draft tokens of a step: auto, off or the most (default: auto)")
    add_urgency(to)


def add_urgency(to: argparse.ArgumentParser) -> None:
    """Flags for how soon the answer is wanted."""
    to.add_argument("--priority", type=int, help="larger is more urgent, up to what the API key allows (default: 0)")
    to.add_argument("--target-first-token-ms", type=int, metavar="MS", help="aim at this time to the first token")
    to.add_argument("--target-token-gap-ms", type=int, metavar="MS", help="aim at this time between tokens")


def urgency(given: argparse.Namespace) -> dict[str, int]:
    """The flags of `add_urgency` that were given, as options of the client's calls."""
    names = ("priority", "target_first_token_ms", "target_token_gap_ms")
    return {name: value for name in names if (value := getattr(given, name)) is not None}


def options(given: argparse.Namespace) -> dict[str, Any]:
    """The flags that were given, as options of the client's calls."""
    names = ("model", "max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "speculation")
    return {name: value for name in names if (value := getattr(given, name)) is not None} | urgency(given)


def defaults(models: Iterable[types_pb2.ModelDescription], name: str) -> dict[str, Any]:
    """Options that nobody gave: as the publisher of the model, of those on offer, would have it sampled."""
    found = [model for model in models if name in ("", model.name)]
    fields = found[0].default_sampling.ListFields() if len(found) == 1 else []
    return {"temperature": TEMPERATURE} | {field.name: value for field, value in fields}
