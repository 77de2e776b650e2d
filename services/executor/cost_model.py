"""How long a step takes, as a sum of few terms fitted to measured steps, and the file that keeps them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class StepShape(NamedTuple):
    """What a step computes: rows of one token, which decode, and longer ones, which are pieces of prompts."""

    decode_rows: int
    context_tokens: int  # that decoding rows read, their own included
    prompt_tokens: int
    prompt_pairs: int  # of prompt tokens with those they read, themselves included

    @classmethod
    def of(cls, counts: Sequence[int], contexts: Sequence[int]) -> StepShape:
        """A step over rows of so many tokens, which have so many tokens with KV after it."""
        decode_rows = context_tokens = prompt_tokens = prompt_pairs = 0
        for count, context in zip(counts, contexts, strict=True):
            if count == 1:
                decode_rows += 1
                context_tokens += context
            else:
                prompt_tokens += count
                prompt_pairs += count * context - count * (count - 1) // 2
        return cls(decode_rows, context_tokens, prompt_tokens, prompt_pairs)


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds of a step: what every step takes, and what each of its parts adds."""

    step: float
    decode_row: float
    context_token: float
    prompt_token: float
    prompt_pair: float

    def __post_init__(self) -> None:
        if not all(value >= 0 for value in asdict(self).values()) or self.step + self.decode_row <= 0:
            raise ValueError("cost: no term may be negative, and a step takes time")

    def seconds(self, shape: StepShape) -> float:
        rows, context, prompt, pairs = shape
        return (
            self.step
            + self.decode_row * rows
            + self.context_token * context
            + self.prompt_token * prompt
            + self.prompt_pair * pairs
        )


class Fit(NamedTuple):
    """A cost model and how far it is from what was measured, as parts of the measured time."""

    cost: CostModel
    median_error: float
    p95_error: float
    step_count: int


def fit(steps: Sequence[tuple[StepShape, float]]) -> Fit:
    """The model with the least squared relative error whose terms are none of them negative.

    Of so few terms every choice of those that are above zero can be tried, which finds what Lawson and Hanson's
    non-negative least squares (1974) would. Raises ValueError where fewer steps than terms were measured.
    """
    terms = len(fields(CostModel))
    if len(steps) < terms:
        raise ValueError(f"{len(steps)} measured steps cannot tell {terms} terms apart")
    seconds = np.array([measured for _, measured in steps])
    parts = np.array([(1, *shape) for shape, _ in steps]) / seconds[:, None]
    scale = np.abs(parts).max(axis=0)
    scale[scale == 0] = 1.0
    scaled = parts / scale
    best, least = np.zeros(terms), float(len(steps))
    for chosen in itertools.chain.from_iterable(itertools.combinations(range(terms), n) for n in range(1, terms + 1)):
        used = scaled[:, chosen]
        found = np.linalg.lstsq(used, np.ones(len(steps)), rcond=None)[0]
        error = float(np.square(used @ found - 1).sum())
        if found.min() >= 0 and error < least:
            best, least = np.zeros(terms), error
            best[list(chosen)] = found / scale[list(chosen)]
    errors: NDArray[np.float64] = np.abs(parts @ best - 1)
    return Fit(CostModel(*best.tolist()), float(np.median(errors)), float(np.percentile(errors, 95)), len(steps))


@dataclass(frozen=True, slots=True)
class Machine:
    """An executor to imitate: how fast it is, and what fits into it."""

    description: dict[str, Any]  # what was measured, for people: machine, model, formats
    cost: CostModel
    residuals: dict[str, float]
    block_size: int  # token slots
    block_bytes: int
    block_count: int
    max_sequences: int
    max_step_tokens: int
    context_length: int
    vocab_size: int

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def read(cls, path: Path) -> Machine:
        """Raises ValueError where the file is not what `write` writes, OSError where it cannot be read."""
        try:
            found = json.loads(path.read_text())
            machine = cls(**found | {"cost": CostModel(**found["cost"])})
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path}: no description of a machine: {error}") from None
        sizes = [machine.block_size, machine.block_bytes, machine.block_count, machine.max_sequences]
        sizes += [machine.max_step_tokens, machine.context_length, machine.vocab_size]
        if not all(isinstance(size, int) and size > 0 for size in sizes):
            raise ValueError(f"{path}: sizes must be whole numbers above zero")
        return machine
