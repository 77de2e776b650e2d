"""A real prefill and real decodes before an executor serves: proves that the model computes, and how fast."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from statistics import median

import numpy as np

from services.common.errors import QuireError, Reason
from services.executor.backends.base import Backend, KvShape, SampleRow, SamplingRule, StepInputs
from services.executor.speculation.proposer import Proposer

DECODE_STEPS = 2
PREFILL_TOKENS = 48  # enough to measure by, and soon done
VERIFIED = (1, 2, 3, 4, 6, 8, 12, 17)  # tokens of steps with drafts
VERIFY_ROUNDS, VERIFY_SECONDS = 8, 0.5
_TOKEN = 1  # any id below every vocabulary


@dataclass(frozen=True, slots=True)
class Measured:
    decode_step_seconds: float
    prefill_tokens_per_second: float
    draft_token_seconds: float = 0.0  # of proposing one draft for one sequence


def warm_up(
    backend: Backend, shape: KvShape, max_step_tokens: int, context_length: int, proposer: Proposer | None = None
) -> Measured:
    """Computes in the pool's first blocks, whose content nobody knows yet. Raises MODEL_LOAD_FAILED on bad logits."""
    most = min(shape.block_count * shape.block_size, context_length, max_step_tokens, PREFILL_TOKENS + DECODE_STEPS)
    length = max(most - DECODE_STEPS, 1)
    timed_step(backend, shape, 0, min(length, 8))  # first calls allocate and compile
    prefill = timed_step(backend, shape, 0, length)
    decodes = [timed_step(backend, shape, length + at, 1) for at in range(most - length)] or [prefill]
    draft_seconds = proposer.warm_up(shape) if proposer is not None else 0.0
    return Measured(median(decodes), length / prefill, draft_seconds)


def verify_costs(backend: Backend, shape: KvShape) -> list[tuple[int, float]]:
    """Tokens and seconds of steps that draw a token after each of theirs: the best of some, in little time."""
    room = shape.block_count * shape.block_size
    counts = [count for count in VERIFIED if count <= min(room, backend.spec.context_length)]
    best = dict.fromkeys(counts, math.inf)
    began = time.perf_counter()
    for _ in range(VERIFY_ROUNDS):
        for count in counts:
            best[count] = min(best[count], timed_step(backend, shape, 0, count, drafts=count - 1))
        if time.perf_counter() - began > VERIFY_SECONDS:
            break
    return list(best.items())


def timed_step(backend: Backend, shape: KvShape, start: int, count: int, *, layers: int = 0, drafts: int = 0) -> float:
    """Seconds of a step over tokens [start, start + count) of one sequence, in the pool's first blocks.

    The last `drafts` of them are drafts. Raises MODEL_LOAD_FAILED on bad logits.
    """
    blocks = -(-(start + count) // shape.block_size)
    rule = SamplingRule(temperature=0.0)
    last = count - 1 - drafts
    inputs = StepInputs(
        token_ids=np.full(count, _TOKEN, np.int32),
        positions=np.arange(start, start + count, dtype=np.int32),
        query_starts=np.array([0, count], np.int32),
        context_lengths=np.array([start + count], np.int32),
        block_tables=np.arange(blocks, dtype=np.int32)[None],
        samples=[SampleRow(last, rule, [_TOKEN] * (start + last + 1), [], draft_ids=[_TOKEN] * drafts)],
        layers=layers,
    )
    began = time.perf_counter()
    sampled = backend.step(inputs).sampled
    if len(sampled) != 1 + drafts or None in sampled:
        raise QuireError(Reason.MODEL_LOAD_FAILED, "warm-up: the model's logits are not finite")
    return time.perf_counter() - began
