"""What is sent, and when: requests with lengths and arrival times, from flags or from a recorded trace."""

from __future__ import annotations

import csv
import datetime
import itertools
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

TRACE_BLOCK_TOKENS = 512  # Mooncake traces name a prompt's blocks of this size

# Short words that nearly every vocabulary holds as one token, so that a prompt of n words has about n tokens.
COMMON_WORDS = (
    "the of and to in is was for that on as with by at from his he it an were are which this be or had not its "
    "their but has have also one two first after new been who they her all other time when into there more some "
    "only can no out up most then during over about made may such used these would between city part"
)
WORDS = COMMON_WORDS.split()


@dataclass(frozen=True, slots=True)
class Request:
    """One request to send. Equal block ids stand for equal parts of prompts."""

    index: int
    arrival: float  # seconds after the start; ignored by the closed loop
    prompt_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TraceScale:
    """How a trace is fitted to a smaller machine: time runs `speed` times faster, lengths shrink and are capped."""

    speed: float = 1.0
    lengths: float = 1.0
    max_prompt_tokens: int | None = None
    max_output_tokens: int | None = None


def fixed_requests(count: int, prompt_tokens: int, output_tokens: int) -> list[Request]:
    """Equal requests without arrival times."""
    return [Request(index, 0.0, prompt_tokens, output_tokens) for index in range(count)]


def poisson_requests(count: int, rate: float, prompt_tokens: int, output_tokens: int, seed: int) -> list[Request]:
    """Equal requests that arrive at random, `rate` a second on average; the first at 0."""
    draw = random.Random(seed)
    gaps = itertools.chain([0.0], (draw.expovariate(rate) for _ in range(count - 1)))
    return [
        Request(index, arrival, prompt_tokens, output_tokens)
        for index, arrival in zip(range(count), itertools.accumulate(gaps), strict=True)
    ]


def trace_requests(path: Path, count: int | None, scale: TraceScale) -> list[Request]:
    """The first `count` requests of an Azure CSV or a Mooncake JSONL trace. Raises ValueError where it is neither."""
    rows = _mooncake_rows(path) if path.suffix == ".jsonl" else _azure_rows(path)
    chosen = list(itertools.islice(rows, count))
    if not chosen:
        raise ValueError(f"{path}: the trace is empty")
    start = chosen[0][0]
    return [
        Request(
            index,
            (arrival - start) / scale.speed,
            _scaled(prompt, scale.lengths, scale.max_prompt_tokens),
            _scaled(output, scale.lengths, scale.max_output_tokens),
            block_ids,
        )
        for index, (arrival, prompt, output, block_ids) in enumerate(chosen)
    ]


def prompt_text(request: Request, seed: int) -> str:
    """A prompt of about that many tokens. Different requests share no beginning, unless their blocks are equal."""
    words: list[str] = []
    for at, size in enumerate(_block_sizes(request.prompt_tokens)):
        shared = request.block_ids[at] if at < len(request.block_ids) else None
        key = f"{seed}/block/{shared}" if shared is not None else f"{seed}/request/{request.index}/{at}"
        words += random.Random(key).choices(WORDS, k=size)
    return " ".join(words)


def _block_sizes(tokens: int) -> Iterator[int]:
    for start in range(0, tokens, TRACE_BLOCK_TOKENS):
        yield min(TRACE_BLOCK_TOKENS, tokens - start)


def _scaled(length: int, factor: float, limit: int | None) -> int:
    scaled = max(1, round(length * factor))
    return scaled if limit is None else min(scaled, limit)


Row = tuple[float, int, int, tuple[int, ...]]


def _azure_rows(path: Path) -> Iterator[Row]:
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        wanted: Sequence[str] = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
        if not set(wanted) <= set(reader.fieldnames or ()):
            raise ValueError(f"{path}: the columns of a CSV trace are {', '.join(wanted)}")
        for row in reader:
            moment, _, fraction = row["TIMESTAMP"].partition(".")
            seconds = datetime.datetime.fromisoformat(moment).replace(tzinfo=datetime.UTC).timestamp()
            arrival = seconds + float(f"0.{fraction.split('+')[0] or 0}")
            yield arrival, int(row["ContextTokens"]), int(row["GeneratedTokens"]), ()


def _mooncake_rows(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line)
                block_ids = tuple(row.get("hash_ids", ()))
                yield row["timestamp"] / 1000, row["input_length"], row["output_length"], block_ids
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path}, line {number}: no request of a JSONL trace: {error!r}") from error
