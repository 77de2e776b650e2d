"""From what was seen of each request to the numbers that are reported. Pure functions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

PERCENTILES = (50, 95, 99)


@dataclass(slots=True)
class Sample:
    """What a client saw of one request. Times are seconds of one monotonic clock."""

    start: float  # when it was due, so that a late client counts against the result
    arrivals: list[float] = field(default_factory=list)  # of messages that carry tokens
    token_counts: list[int] = field(default_factory=list)  # per message; empty where the API does not say
    end: float = 0.0
    output_tokens: int = 0
    prompt_tokens: int = 0
    error: str | None = None
    error_message: str = ""  # what the server said of it
    caller: int = 0  # index of the API key that asked


def percentile(values: Sequence[float], rank: float) -> float:
    """The value below which `rank` percent lie, between neighbours by distance. NaN of nothing."""
    if not values:
        return math.nan
    ordered = sorted(values)
    place = (len(ordered) - 1) * rank / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def token_gaps(sample: Sample) -> list[float]:
    """Seconds per token after the first message: each message's gap is shared by the tokens that it brought."""
    counts: Sequence[float] = sample.token_counts
    if not counts and sample.arrivals:
        counts = [sample.output_tokens / len(sample.arrivals)] * len(sample.arrivals)
    gaps: list[float] = []
    for before, now, count in zip(sample.arrivals, sample.arrivals[1:], counts[1:], strict=False):
        if count > 0:
            gaps += [(now - before) / count] * max(1, round(count))
    return gaps


def message_gaps(sample: Sample) -> list[float]:
    """Seconds between messages: how long a reader sees nothing new."""
    return [now - before for before, now in pairwise(sample.arrivals)]


def summarize(samples: Sequence[Sample]) -> dict[str, Any]:
    """The report: rates and latencies of the requests that succeeded, and how many failed and why."""
    good = [sample for sample in samples if sample.error is None]
    duration = max(s.end for s in good) - min(s.start for s in good) if good else 0.0
    output_tokens = sum(sample.output_tokens for sample in good)
    prompt_tokens = sum(sample.prompt_tokens for sample in good)
    return {
        "requests": len(samples),
        "errors": len(samples) - len(good),
        "error_kinds": dict(Counter(sample.error for sample in samples if sample.error is not None)),
        "error_messages": {s.error: s.error_message for s in reversed(samples) if s.error and s.error_message},
        "duration_s": round(duration, 4),
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "output_tok_s": round(output_tokens / duration, 3) if duration > 0 else 0.0,
        "request_s": round(len(good) / duration, 4) if duration > 0 else 0.0,
        "ttft_ms": _spread(sample.arrivals[0] - sample.start for sample in good if sample.arrivals),
        "itl_ms": _spread(gap for sample in good for gap in token_gaps(sample)),
        "gap_ms": _spread(gap for sample in good for gap in message_gaps(sample)),
        "e2e_ms": _spread(sample.end - sample.start for sample in good),
    }


def engine_bound(prompt_tokens: int, output_tokens: int, prefill_tok_s: float, decode_tok_s: float) -> float:
    """Output tokens per second that an engine with these rates could serve at most, at that concurrency."""
    return output_tokens / (prompt_tokens / prefill_tok_s + output_tokens / decode_tok_s)


def _spread(seconds: Iterable[float]) -> dict[str, float | None]:
    values = list(seconds)
    return {f"p{rank}": round(percentile(values, rank) * 1e3, 3) if values else None for rank in PERCENTILES}
