"""The generation flags that `quire generate` and `quire chat` share."""

from __future__ import annotations

import argparse

from quire.v1 import gateway_pb2, types_pb2


def add_sampling(to: argparse.ArgumentParser, *, max_tokens: int) -> None:
    """Flags for the model and how to sample; the server checks the values."""
    to.add_argument("--model", default="", help="model name (default: the only one)")
    to.add_argument("--max-tokens", type=int, default=max_tokens, help=f"longest answer (default: {max_tokens})")
    to.add_argument("--temperature", type=float, help="0 always takes the likeliest token (default: 1)")
    to.add_argument("--top-p", type=float, help="sample among the likeliest tokens of this total probability")
    to.add_argument("--top-k", type=int, help="sample among this many likeliest tokens")
    to.add_argument("--seed", type=int, help="equal seeds give equal answers")
    to.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeatable")


def generation_input(given: argparse.Namespace) -> gateway_pb2.GenerationInput:
    """A request with everything but its prompt."""
    names = ("temperature", "top_p", "top_k", "seed")
    chosen = {name: getattr(given, name) for name in names if getattr(given, name) is not None}
    return gateway_pb2.GenerationInput(
        model=given.model,
        sampling=types_pb2.SamplingParams(**chosen),
        stop=types_pb2.StopCriteria(max_tokens=given.max_tokens, stop=given.stop),
    )
