"""What is asked for, and when: the requests of a run as columns, so that a million of them take little memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.bench.workload import TRACE_BLOCK_TOKENS, TraceScale, trace_requests


class Tenant(NamedTuple):
    """Who asks: what part of the requests are its own, its weight, and the priority of its requests."""

    name: str
    share: float = 1.0
    weight: float = 1.0
    priority: int = 0


class Asked(NamedTuple):
    """One request."""

    number: int  # from 0
    arrival: float  # seconds
    prompt_tokens: int
    output_tokens: int
    tenant: int  # index
    block_ids: tuple[int, ...]  # equal ids are equal parts of prompts


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths of requests, one row each. With arrivals where they were recorded."""

    prompts: NDArray[np.int32]
    outputs: NDArray[np.int32]
    block_ids: Sequence[tuple[int, ...]] = ()  # by row, or none at all
    block_tokens: int = TRACE_BLOCK_TOKENS  # what one block id stands for
    arrivals: NDArray[np.float64] | None = None  # seconds, ascending from 0

    @classmethod
    def fixed(cls, prompt_tokens: int, output_tokens: int) -> Lengths:
        return cls(np.array([prompt_tokens], np.int32), np.array([output_tokens], np.int32))

    @classmethod
    def trace(cls, path: Path, scale: TraceScale) -> Lengths:
        """Of an Azure CSV or a Mooncake JSONL. Raises ValueError where it is neither, OSError where it is not there."""
        rows = trace_requests(path, None, scale)
        return cls(
            np.array([row.prompt_tokens for row in rows], np.int32),
            np.array([row.output_tokens for row in rows], np.int32),
            [row.block_ids for row in rows] if any(row.block_ids for row in rows) else (),
            max(1, round(TRACE_BLOCK_TOKENS * scale.lengths)),
            np.array([row.arrival for row in rows]),
        )


@dataclass(frozen=True, slots=True)
class Load:
    """All requests of a run, by arrival. `rows` are those of the lengths."""

    lengths: Lengths
    rows: NDArray[np.int32]
    arrivals: NDArray[np.float64]  # seconds
    tenants: NDArray[np.int16]
    concurrency: int | None = None  # requests at a time, in a closed loop; None: each comes at its own time

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Asked]:
        lengths = self.lengths
        prompts, outputs, block_ids = lengths.prompts, lengths.outputs, lengths.block_ids
        for index, (row, arrival, tenant) in enumerate(zip(self.rows, self.arrivals, self.tenants, strict=True)):
            yield Asked(
                index,
                float(arrival),
                int(prompts[row]),
                int(outputs[row]),
                int(tenant),
                block_ids[row] if block_ids else (),
            )


def recorded(lengths: Lengths, count: int | None, tenants: Sequence[Tenant], seed: int) -> Load:
    """The trace as it was; from the start again, after a mean gap, where more requests are wanted than it has."""
    assert lengths.arrivals is not None
    once = len(lengths.arrivals)
    count = count or once
    rounds, rows = np.divmod(np.arange(count, dtype=np.int64), once)
    last = float(lengths.arrivals[-1])
    period = last + (last / (once - 1) if once > 1 else 1.0)
    return Load(
        lengths, rows.astype(np.int32), lengths.arrivals[rows] + rounds * period, _tenants(count, tenants, seed)
    )


def arriving(
    lengths: Lengths, count: int, rate: float, burstiness: float, tenants: Sequence[Tenant], seed: int
) -> Load:
    """Random gaps of a gamma distribution, `rate` requests a second on average; lengths drawn from the rows.

    `burstiness` is the gaps' coefficient of variation: 1 is a Poisson process, more is burstier, 0 is regular.
    """
    draw = np.random.default_rng([seed, 1])
    if burstiness > 0:
        shape = 1 / burstiness**2
        gaps = draw.gamma(shape, 1 / (rate * shape), count)
    else:
        gaps = np.full(count, 1 / rate)
    gaps[0] = 0.0
    return Load(lengths, _drawn(lengths, count, seed), np.cumsum(gaps), _tenants(count, tenants, seed))


def closed(lengths: Lengths, count: int, concurrency: int, tenants: Sequence[Tenant], seed: int) -> Load:
    """So many requests at a time: each one's end lets the next one come."""
    return Load(lengths, _drawn(lengths, count, seed), np.zeros(count), _tenants(count, tenants, seed), concurrency)


class Prompts:
    """Token ids of prompts: equal where their blocks are, and different from the first token on elsewhere."""

    def __init__(self, vocab_size: int, block_tokens: int, longest: int) -> None:
        self._base = vocab_size - 1
        self._block_tokens = block_tokens
        self._filling = [1] * max(longest, block_tokens)

    def of(self, asked: Asked) -> list[int]:
        if not asked.block_ids:
            return self._stretch(2 * asked.number, asked.prompt_tokens)
        size = self._block_tokens
        stretches = (
            self._stretch(2 * block_id + 1, min(size, asked.prompt_tokens - start))
            for block_id, start in zip(asked.block_ids, range(0, asked.prompt_tokens, size), strict=False)
        )
        tokens = list(itertools.chain.from_iterable(stretches))
        return tokens + self._filling[: asked.prompt_tokens - len(tokens)]

    def _stretch(self, number: int, length: int) -> list[int]:
        """Tokens that begin with a number: its digits, and then nothing but ones."""
        digits = []
        while number:
            number, digit = divmod(number, self._base)
            digits.append(digit + 1)
        digits.append(0)  # ends the number: it is never read on in the filling
        return (digits + self._filling[: max(0, length - len(digits))])[:length]


def _drawn(lengths: Lengths, count: int, seed: int) -> NDArray[np.int32]:
    return np.random.default_rng([seed, 2]).integers(len(lengths.prompts), size=count, dtype=np.int32)


def _tenants(count: int, tenants: Sequence[Tenant], seed: int) -> NDArray[np.int16]:
    shares = np.array([tenant.share for tenant in tenants], float)
    return np.random.default_rng([seed, 3]).choice(len(tenants), count, p=shares / shares.sum()).astype(np.int16)
