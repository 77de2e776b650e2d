"""`quire bench engine --fit`: steps of many shapes are measured, and a cost model is fitted to them for simulations."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from statistics import median
from typing import NamedTuple, cast

from quire.v1 import executor_pb2
from services.executor.backends.base import Backend, StepInputs, StepOutputs
from services.executor.batch import StepLimits
from services.executor.bench_loop import BenchLoop, greedy_sequence
from services.executor.capacity import KvDemand, kv_shape
from services.executor.cost_model import Fit, Machine, StepShape
from services.executor.loader import LoadedModel
from services.executor.memory import measure as measure_memory

DECODE_STEPS = 12
CHUNK = 32
"""Tokens of the pieces in which prompts come in beside sequences that decode."""
TOKEN = 1  # any id below every vocabulary

Measured = list[tuple[StepShape, float]]


class Batch(NamedTuple):
    """Sequences of equal prompts: all of them decode together, then half of them while the others' prompts come in."""

    sequences: int
    prompt: int  # tokens

    @property
    def length(self) -> int:
        """Tokens of a sequence at the end."""
        return self.prompt + 2 * DECODE_STEPS + self.pieces + 1

    @property
    def pieces(self) -> int:
        """Of a prompt that comes in beside decodes."""
        return -(-self.prompt // CHUNK)


def batches(most_sequences: int) -> list[Batch]:
    """From one sequence to as many as a step computes, with few long contexts or many short ones."""
    wanted = [(1, 64), (1, 2048), (2, 256), (4, 1024), (8, 128), (16, 512), (32, 64), (most_sequences, 32)]
    return list(dict.fromkeys(Batch(min(count, most_sequences), prompt) for count, prompt in wanted))


def blocks_needed(most_sequences: int, block_size: int) -> int:
    """KV blocks of the largest batch."""
    return max(batch.sequences * -(-batch.length // block_size) for batch in batches(most_sequences))


def measure_steps(model: LoadedModel, limits: StepLimits, repeat: int, tell: Callable[[str], None]) -> Measured:
    """Seconds of each step, the median of some runs, but for batches that the context is too short for.

    Raises QuireError where a step fails.
    """
    measured: Measured = []
    for batch in batches(limits.sequences):
        if batch.length > model.backend.spec.context_length:
            continue
        runs = [list(_run(model, limits, batch)) for _ in range(repeat)]
        measured += [(same[0][0], median(seconds for _, seconds in same)) for same in zip(*runs, strict=True)]
        tell(f"{batch.sequences} sequences of {batch.prompt} tokens: {len(runs[0])} steps")
    return measured


def machine(model: LoadedModel, fitted: Fit, limits: StepLimits) -> Machine:
    """What an executor of this model on this machine is like, with as many blocks as it would take by itself."""
    backend, shape = model.backend, model.shape
    demand = KvDemand(shape.block_size, limits.sequences, backend.spec.context_length)
    own = kv_shape(demand, [shape.block_bytes], measure_memory().available + shape.byte_count)
    return Machine(
        description=dict(model.describe()),
        cost=fitted.cost,
        residuals={
            "median_error": round(fitted.median_error, 4),
            "p95_error": round(fitted.p95_error, 4),
            "steps": fitted.step_count,
        },
        block_size=shape.block_size,
        block_bytes=shape.block_bytes,
        block_count=own.block_count,
        max_sequences=limits.sequences,
        max_step_tokens=limits.tokens,
        context_length=backend.spec.context_length,
        vocab_size=backend.spec.vocab_size,
    )


class _Recorder:
    """A backend that remembers the shape of its last step."""

    def __init__(self, backend: Backend) -> None:
        self._shape: StepShape | None = None
        self._backend = backend

    def step(self, inputs: StepInputs) -> StepOutputs:
        starts = inputs.query_starts.tolist()
        counts = [end - start for start, end in pairwise(starts)]
        self._shape = StepShape.of(counts, inputs.context_lengths.tolist())
        return self._backend.step(inputs)

    def take_shape(self) -> StepShape | None:
        """What was computed since the last call; None for nothing."""
        shape, self._shape = self._shape, None
        return shape


def _run(model: LoadedModel, limits: StepLimits, batch: Batch) -> Iterator[tuple[StepShape, float]]:
    recorder = _Recorder(model.backend)
    loop = BenchLoop(model, limits, cast(Backend, recorder))  # nothing but steps is asked of it
    ids = list(range(1, batch.sequences + 1))
    early, late = ids[: -(-len(ids) // 2)], ids[-(-len(ids) // 2) :]
    whole = -(-batch.prompt // limits.tokens)
    plans = [
        _plan(model, batch, early, [(early, limits.tokens, whole), (early, 1, DECODE_STEPS)]),
        _plan(model, batch, late, [(early, 1, batch.pieces), (late, CHUNK, batch.pieces)]),
        _plan(model, batch, [], [(ids, 1, DECODE_STEPS)]),
    ]
    for plan in plans:
        loop.take(plan)
        while True:
            started = time.perf_counter()
            loop.turn()
            seconds = time.perf_counter() - started
            shape = recorder.take_shape()
            if shape is None:
                break
            yield shape, seconds
    loop.check()


def _plan(
    model: LoadedModel, batch: Batch, entering: Sequence[int], grants: Sequence[tuple[Sequence[int], int, int]]
) -> executor_pb2.StepPlan:
    """`grants` are (sequences, tokens of a step at most, steps)."""
    length, prompt = batch.length, [TOKEN] * batch.prompt
    enter = [greedy_sequence(number, prompt, length, length, model.shape.block_size) for number in entering]
    plan = executor_pb2.StepPlan(enter=enter)
    for ids, tokens, steps in grants:
        plan.sequence_ids.extend(ids)
        plan.token_limits.extend([tokens] * len(ids))
        plan.step_counts.extend([steps] * len(ids))
    return plan
