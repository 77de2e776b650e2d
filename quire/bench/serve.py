"""`quire bench serve`: load on a running server, over gRPC or OpenAI's API, and what its clients see."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import httpx
from tqdm import tqdm

from quire.bench.clients import Client, GrpcClient, Manner, OpenAIClient
from quire.bench.load import closed_loop, open_loop
from quire.bench.measures import Sample, summarize
from quire.bench.workload import Request, TraceScale, fixed_requests, poisson_requests, trace_requests
from quire.cli.common import add_address, api_key, gateway_address, parser
from quire.cli.sampling import add_urgency, urgency

EXAMPLES = """
quire bench serve --concurrency 8 --requests 64 --json
quire bench serve --rate 4 --requests 200 --prompt-tokens 256 --output-tokens 128
quire bench serve --trace conversations.csv --requests 500 --trace-speed 2 --max-prompt-tokens 1024
quire bench serve --api openai --base-url http://127.0.0.1:8000/v1 --concurrency 8
quire bench serve --api-keys qk-a,qk-b --concurrency 16     two tenants in turn
"""
NOTE = """Prompts are random common words, about a token each; the report gives the server's own count.
gap_ms is the time between messages; itl_ms divides it by the tokens that the later message brought.

The exit status is 0 where any request was answered, 1 where none was, 2 for wrong use."""


def _parser() -> argparse.ArgumentParser:
    top = parser("bench serve", f"Measures a running server.\n\n{NOTE}", EXAMPLES)
    add_address(top)
    top.add_argument("--api", choices=("grpc", "openai"), default="grpc", help="which API to speak (default: grpc)")
    top.add_argument("--base-url", metavar="URL", help="of an OpenAI API, up to and with /v1")
    top.add_argument(
        "--api-keys", type=_keys, metavar="KEY,KEY", help="ask with these in turn; the report has a part for each"
    )
    top.add_argument("--model", default="", help="model name (default: the server's only or first one)")
    loop = top.add_mutually_exclusive_group()
    loop.add_argument(
        "--concurrency", type=_count, default=1, metavar="N", help="closed loop: requests at a time (default: 1)"
    )
    loop.add_argument("--rate", type=_positive, metavar="R", help="open loop: requests a second, at random moments")
    loop.add_argument("--trace", type=Path, metavar="FILE", help="open loop: replays an Azure .csv or Mooncake .jsonl")
    top.add_argument("--requests", type=_count, metavar="N", help="how many (default: 4 x concurrency, or 64)")
    top.add_argument("--prompt-tokens", type=_count, default=128, metavar="N", help="per request (default: 128)")
    top.add_argument("--output-tokens", type=_count, default=64, metavar="N", help="per request (default: 64)")
    top.add_argument("--warmup", type=int, default=1, metavar="N", help="requests sent before measuring (default: 1)")
    top.add_argument("--trace-speed", type=_positive, default=1.0, metavar="X", help="replays a trace X times as fast")
    top.add_argument("--trace-lengths", type=_positive, default=1.0, metavar="X", help="multiplies a trace's lengths")
    top.add_argument("--max-prompt-tokens", type=_count, metavar="N", help="caps a trace's prompts")
    top.add_argument("--max-output-tokens", type=_count, metavar="N", help="caps a trace's outputs")
    top.add_argument("--seed", type=int, default=0, help="of prompts and arrivals (default: 0)")
    top.add_argument("--timeout", type=_positive, default=600.0, metavar="S", help="of a request (default: 600)")
    add_urgency(top)
    top.add_argument("--json", action="store_true", help="print one line of JSON instead of a table")
    return top


def main(argv: Sequence[str]) -> int:
    """Exit status: 0 where any request succeeded, 1 where none did, 2 for wrong use."""
    top = _parser()
    args = top.parse_args(argv)
    if (args.api == "openai") != (args.base_url is not None):
        top.error("--api openai and --base-url go together")
    try:
        requests = _requests(args)
        samples = asyncio.run(_measure(args, requests))
    except (OSError, ValueError) as error:
        print(f"quire bench serve: {error}", file=sys.stderr)
        return 2
    except (httpx.HTTPError, grpc.RpcError) as error:
        print(f"quire bench serve: no server answers: {error}", file=sys.stderr)
        return 1
    report = _describe(args) | summarize(samples)
    if args.api_keys:
        report["by_key"] = [summarize([s for s in samples if s.caller == at]) for at in range(len(args.api_keys))]
    is_served = report["errors"] < report["requests"]
    if args.json:
        print(json.dumps(report))
    elif is_served:
        print(_table(report))
    if not is_served:
        print(f"quire bench serve: no request was answered: {'; '.join(_failures(report))}", file=sys.stderr)
    return 0 if is_served else 1


def _requests(args: argparse.Namespace) -> list[Request]:
    if args.trace is not None:
        scale = TraceScale(args.trace_speed, args.trace_lengths, args.max_prompt_tokens, args.max_output_tokens)
        return trace_requests(args.trace, args.requests, scale)
    if args.rate is not None:
        return poisson_requests(args.requests or 64, args.rate, args.prompt_tokens, args.output_tokens, args.seed)
    return fixed_requests(args.requests or 4 * args.concurrency, args.prompt_tokens, args.output_tokens)


def _client(args: argparse.Namespace, requests: Sequence[Request]) -> Client:
    # The variable's key is Quire's: an unknown server behind --base-url is not to learn it.
    key = api_key(args.api_key) if args.api == "grpc" else args.api_key or ""
    manner = Manner(args.model, args.timeout, args.api_keys or (key,), **urgency(args))
    if args.api == "grpc":
        return GrpcClient(gateway_address(args), manner)
    closed = args.rate is None and args.trace is None
    connections = args.concurrency if closed else len(requests)
    return OpenAIClient(args.base_url, manner, connections)


async def _measure(args: argparse.Namespace, requests: Sequence[Request]) -> list[Sample]:
    samples: list[Sample] = []
    async with _client(args, requests) as client:
        warmup = fixed_requests(args.warmup, requests[0].prompt_tokens, requests[0].output_tokens)
        # Other prompts than the measured ones, so that no prefix is warm unless the workload makes it so.
        await closed_loop(client, warmup, args.concurrency, args.seed + 1, lambda sample: None)
        with tqdm(total=len(requests), desc="requests", unit="", file=sys.stderr, disable=None) as bar:

            def done(sample: Sample) -> None:
                samples.append(sample)
                bar.update()

            if args.rate is None and args.trace is None:
                await closed_loop(client, requests, args.concurrency, args.seed, done)
            else:
                await open_loop(client, requests, args.seed, done)
    return samples


def _describe(args: argparse.Namespace) -> dict[str, Any]:
    load: dict[str, Any] = {"concurrency": args.concurrency}
    if args.rate is not None:
        load = {"rate": args.rate}
    elif args.trace is not None:
        load = {"trace": args.trace.name, "trace_speed": args.trace_speed}
    return {"api": args.api} | load


def _table(report: dict[str, Any]) -> str:
    lines = [
        f"requests      {report['requests']} ({report['errors']} failed) in {report['duration_s']:.2f} s",
        f"output        {report['output_tok_s']:.1f} tokens/s, {report['request_s']:.2f} requests/s",
        f"tokens        {report['prompt_tokens']} in, {report['output_tokens']} out",
        "",
        f"{'ms':<14}{'p50':>10}{'p95':>10}{'p99':>10}",
    ]
    names = {"ttft_ms": "first token", "itl_ms": "next token", "gap_ms": "next message", "e2e_ms": "whole answer"}
    for key, name in names.items():
        cells = (f"{value:>10.2f}" if value is not None else f"{'-':>10}" for value in report[key].values())
        lines.append(f"{name:<14}{''.join(cells)}")
    for at, part in enumerate(report.get("by_key", ()), 1):
        first = part["ttft_ms"]["p99"]
        waited = "-" if first is None else f"{first:.2f} ms"
        lines.append(f"key {at:<9} {part['output_tok_s']:.1f} tokens/s, p99 of the first token {waited}")
    lines += [f"failed: {failure}" for failure in _failures(report)]
    return "\n".join(lines)


def _failures(report: dict[str, Any]) -> list[str]:
    """Each kind of failure, how often it came and what the server said of the first."""
    said = report["error_messages"]
    kinds = report["error_kinds"].items()
    return [f"{kind} x {count}" + (f" ({said[kind]})" if kind in said else "") for kind, count in kinds]


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return value


def _keys(text: str) -> tuple[str, ...]:
    return tuple(api_key(key) for key in text.split(",") if key)


def _positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value
