"""The generation flags that `quire generate` and `quire chat` share."""

from __future__ import annotations

import argparse
from typing import Any


def add_sampling(to: argparse.ArgumentParser, *, max_tokens: int) -> None:
    """Flags for the model and how to sample; the server checks the values."""
    to.add_argument("--model", default="", help="model name (default: the only one)")
    to.add_argument("--max-tokens", type=int, default=max_tokens, help=f"longest answer (default: {max_tokens})")
    to.add_argument("--temperature", type=float, help="0 always takes the likeliest token (default: 1)")
    to.add_argument("--top-p", type=float, help="sample among the likeliest tokens of this total probability")
    to.add_argument("--top-k", type=int, help="sample among this many likeliest tokens")
    to.add_argument("--seed", type=int, help="equal seeds give equal answers")
    to.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeatable")


def options(given: argparse.Namespace) -> dict[str, Any]:
    """The flags as options of the client's calls."""
    names = ("model", "max_tokens", "temperature", "top_p", "top_k", "seed", "stop")
    return {name: getattr(given, name) for name in names}
