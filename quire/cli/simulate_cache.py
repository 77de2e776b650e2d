"""`quire simulate --cache-only`: a recorded load's prompts over the prefix cache alone."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from quire.cli.common import Failure, failures, parser
from quire.cli.tables import align
from services.common.errors import QuireError
from services.common.plots import check_plot
from services.common.sizes import format_size, parse_size
from services.kvmanager.eviction import POLICIES
from services.kvmanager.replay import (
    BESIDE_DISTINCT,
    HASH_TOKENS,
    Tally,
    TraceRequest,
    counted,
    distinct_blocks,
    read_trace,
    replay_ideal,
    replay_plain_lru,
    replay_pool,
)

DESCRIPTION = """Replays a trace's prompts through the kvmanager's own block pool and prefix index, and tells what part
of their tokens would be found in caches of several sizes, beside a cache that forgets nothing and one that drops the
least recently used block, whatever builds on it.

A trace is lines of JSON with timestamp (ms), input_length (tokens) and hash_ids (one for each 512 tokens), as Mooncake
publishes them. Each prompt fills its blocks and leaves before the next one comes; outputs take no memory.
Without --blocks and --memory the sizes are parts of what all different blocks need."""
EXAMPLES = """
quire simulate --cache-only --trace conversation_trace.jsonl
quire simulate --cache-only --trace conversation_trace.jsonl --memory 16GiB,64GiB --model ~/models/llama --json
quire simulate --cache-only --trace conversation_trace.jsonl --plot curve.png
"""
SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
KV_FORMAT = "bf16"


class Point(NamedTuple):
    """One size of the cache."""

    block_count: int
    pool: Tally
    plain_lru: Tally


def run(argv: Sequence[str]) -> int:
    """Exit status: 0 done, 1 for what cannot be read or drawn, 2 for wrong use."""
    top = _parser()
    args = top.parse_args(argv)
    if args.memory and not args.model:
        top.error("--memory needs --model: a token's bytes depend on it")
    with failures("simulate"):
        try:
            if args.plot:
                check_plot(args.plot)
            requests = read_trace(args.trace)[: args.requests]
        except (OSError, ValueError, QuireError) as error:
            raise Failure(str(error)) from None
        bytes_per_block = _block_bytes(args.model, args.block_size) if args.model else None
        report = _simulate(args, requests, bytes_per_block)
        if args.plot:
            _plot(report, args.plot)
    print(json.dumps(report) if args.json else _table(report))
    return 0


def _parser() -> argparse.ArgumentParser:
    top = parser("simulate --cache-only", DESCRIPTION, EXAMPLES)
    top.add_argument(
        "--cache-only", action="store_true", required=True, help="prompts and the cache alone, no computing"
    )
    top.add_argument("--trace", type=Path, required=True, metavar="FILE", help="lines of JSON in Mooncake's format")
    top.add_argument("--requests", type=_count, metavar="N", help="only the trace's first N")
    size = top.add_mutually_exclusive_group()
    size.add_argument("--blocks", type=_counts, default=[], metavar="N[,N...]", help="sizes of the cache in blocks")
    size.add_argument("--memory", type=_sizes, default=[], metavar="SIZE[,SIZE...]", help="sizes such as 80GiB")
    top.add_argument("--model", metavar="M", help=f"whose KV is kept, in {KV_FORMAT}: as for `quire plan`")
    top.add_argument("--policy", choices=sorted(POLICIES), default="lru", help="of eviction (default: lru)")
    top.add_argument(
        "--block-size", type=_block_size, default=32, metavar="N", help="tokens of a block; divides 512 (default: 32)"
    )
    top.add_argument("--json", action="store_true", help="print one line of JSON instead of a table")
    top.add_argument("--plot", type=Path, metavar="FILE.png", help="draw hit rate over memory")
    return top


def _simulate(args: argparse.Namespace, requests: list[TraceRequest], block_bytes: int | None) -> dict[str, Any]:
    size = args.block_size
    distinct = distinct_blocks(requests, size)
    enough = distinct + BESIDE_DISTINCT
    counts = args.blocks or [memory // (block_bytes or 1) for memory in args.memory]
    counts = sorted(set(counts)) or [max(1, round(share * enough)) for share in SHARES]
    if not counts[0]:
        raise Failure(f"--memory: a block alone takes {format_size(block_bytes or 0)}")
    total = len(requests) * (1 + 2 * len(counts))
    with tqdm(desc="requests", total=total, unit="", file=sys.stderr, disable=None) as bar:
        replayed = partial(counted, requests, bar.update)
        ideal = replay_ideal(replayed(), size)
        points = [
            Point(
                count,
                replay_pool(replayed(), size, used, POLICIES[args.policy]),
                replay_plain_lru(replayed(), size, used),
            )
            for count, used in ((count, min(count, enough)) for count in counts)  # more than enough changes nothing
        ]
    return {
        "trace": args.trace.name,
        "requests": len(requests),
        "prompt_tokens": ideal.query_tokens,
        "policy": args.policy,
        "model": args.model,
        "block_size": size,
        "block_bytes": block_bytes,
        "distinct_blocks": distinct,
        "ideal_hit_rate": ideal.hit_rate,
        "points": [_describe(point, enough, block_bytes) for point in points],
    }


def _describe(point: Point, enough: int, block_bytes: int | None) -> dict[str, Any]:
    return {
        "blocks": point.block_count,
        "bytes": point.block_count * block_bytes if block_bytes else None,
        "share": point.block_count / enough,
        "hit_rate": point.pool.hit_rate,
        "plain_lru_hit_rate": point.plain_lru.hit_rate,
        "evicted_blocks": point.pool.evicted_count,
        "refused_requests": point.pool.refused_count,
    }


def _block_bytes(model: str, block_size: int) -> int:
    from services.executor.kv_bytes import block_bytes
    from services.executor.models.outline import read_outline

    try:
        dims = read_outline(model).kv
    except QuireError as error:
        raise Failure(error.message) from error
    return block_bytes(dims.padded(), KV_FORMAT, block_size)


def _table(report: dict[str, Any]) -> str:
    rows: list[tuple[str, ...]] = [("blocks", "memory", "of all", "found", "plain LRU", "ideal", "evicted", "refused")]
    for point in report["points"]:
        memory = format_size(point["bytes"]) if point["bytes"] else "-"
        rates = (point["hit_rate"], point["plain_lru_hit_rate"], report["ideal_hit_rate"])
        rows.append(
            (
                f"{point['blocks']:,}",
                memory,
                f"{point['share']:.1%}",
                *(f"{rate:.2%}" for rate in rates),
                f"{point['evicted_blocks']:,}",
                f"{point['refused_requests']:,}",
            )
        )
    head = (
        f"{report['requests']:,} prompts, {report['prompt_tokens']:,} tokens; "
        f"{report['distinct_blocks']:,} different blocks of {report['block_size']} tokens; policy {report['policy']}"
    )
    return f"{head}\n{align(rows, right=range(8))}"


def _plot(report: dict[str, Any], path: Path) -> None:
    from quire.cli.curve import draw

    try:
        draw(report, path)
    except (OSError, ValueError) as error:
        raise Failure(f"--plot: {error}") from None


def _count(text: str) -> int:
    count = int(text)
    if count <= 0:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return count


def _counts(text: str) -> list[int]:
    return [_count(part) for part in text.split(",")]


def _sizes(text: str) -> list[int]:
    try:
        return [parse_size(part) for part in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _block_size(text: str) -> int:
    size = _count(text)
    if HASH_TOKENS % size:
        raise argparse.ArgumentTypeError(f"{size} does not divide {HASH_TOKENS}")
    return size
