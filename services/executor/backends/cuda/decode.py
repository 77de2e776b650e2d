"""Steps whose every token draws the next: captured for sizes, and begun ahead where the next one is already clear.

A step that was begun ahead reads the tokens that the last one left on the device. If the worker then asks for another
step, it is forgotten: what it wrote lies beyond all sequences, in slots that their next step writes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from kernels.next_step import feed_back
from services.executor.backends.base import StepInputs
from services.executor.backends.cuda.ahead import goes_on, may_go_on
from services.executor.backends.cuda.buckets import Bucket, find_bucket
from services.executor.backends.cuda.device import Device
from services.executor.backends.cuda.draws import Draws
from services.executor.backends.cuda.kv import GpuKv
from services.executor.backends.cuda.model import GpuModel
from services.executor.backends.cuda.results import Pending
from services.executor.backends.cuda.sampler import Extras, Sampler
from services.executor.backends.cuda.step_arrays import FixedStep

log = logging.getLogger("quire.executor")
_PROGRESS = 8
"""Captures between two lines of progress."""


@dataclass(frozen=True, slots=True)
class _Running:
    """The step that the fixed places hold."""

    inputs: StepInputs
    draws: Draws
    extras: Extras
    pending: Pending


class DecodeSteps:
    """Owns the fixed places and what was captured over them. Not thread-safe."""

    def __init__(
        self, model: GpuModel, kv: GpuKv, sampler: Sampler, device: Device, fixed: FixedStep, context_length: int
    ) -> None:
        self._model, self._kv, self._sampler, self._device, self._fixed = model, kv, sampler, device, fixed
        self._context_length = context_length
        self._captured: dict[Bucket, Callable[[], None]] = {}
        self._running: _Running | None = None
        self._ahead: Pending | None = None

    def captured_step(self, sequences: int, queries: int, context: int) -> Callable[[], None]:
        """What serves such batches. ValueError where nothing does."""
        bucket = find_bucket(self._captured, sequences, queries, context)
        if bucket is None:
            raise ValueError(f"no captured step has {sequences} sequences of {queries} tokens in {context}")
        return self._captured[bucket]

    def capture(self, sizes: Sequence[Bucket]) -> None:
        """Captures steps of these sizes, largest first. Those that find no memory are left out, with a warning."""
        for number, bucket in enumerate(sizes, 1):
            about = {"sequences": bucket.sequences, "queries": bucket.queries, "context": bucket.context}
            try:
                self._captured[bucket] = self._device.capture(self._runner(bucket))
            except torch.OutOfMemoryError:
                log.warning("no memory to capture steps of this size: they are launched kernel by kernel", extra=about)
            if number % _PROGRESS == 0 or number == len(sizes):
                log.info("captured decode steps", extra={"done": number, "of": len(sizes)} | about)

    def take(self, inputs: StepInputs) -> Pending | None:
        """The step, where it was begun ahead; None where it has to be begun."""
        ahead, running = self._ahead, self._running
        self.forget()
        if ahead is None or running is None:
            return None
        if not goes_on(running.inputs, running.pending.token_ids(), inputs, self._kv.block_size):
            return None
        self._fixed.send_tables(inputs.block_tables)
        # The draws are those of before, but for positions, which only the device needs.
        self._running = replace(running, inputs=inputs, pending=ahead)
        return ahead

    def forget(self) -> None:
        """Begins nothing more ahead of the present step, and drops what was."""
        self._ahead = self._running = None

    def begin(self, inputs: StepInputs, draws: Draws) -> Pending | None:
        """Begins a step; None where none of its size was captured."""
        bucket = self._bucket(inputs, draws)
        if bucket is None:
            return None
        self._fixed.fill(inputs, draws)
        self._captured[bucket]()
        extras = self._sampler.extras(draws)
        pending = self._draw(draws, extras)
        self._running = _Running(inputs, draws, extras, pending)
        return pending

    def begin_next(self) -> None:
        """Begins the step after the one under way, where that is clear."""
        running = self._running
        if running is None or not may_go_on(running.inputs, running.draws, self._context_length):
            return
        inputs, draws = running.inputs, running.draws
        sequences = len(inputs.context_lengths)
        bucket = find_bucket(self._captured, sequences, 1, int(inputs.context_lengths.max()) + 1)
        if bucket is None:
            return
        feed_back(self._fixed.decode_state(), self._fixed.drawn, sequences, self._kv.block_size)
        if running.extras.slots is not None:
            self._sampler.counts.drew(draws.samples, running.extras.slots, self._fixed.drawn[:sequences])
        self._captured[bucket]()
        self._ahead = self._draw(draws, running.extras)

    def _bucket(self, inputs: StepInputs, draws: Draws) -> Bucket | None:
        if inputs.prompt_scores or inputs.layers or len(draws.rows) != len(inputs.token_ids):
            return None
        queries = int((inputs.query_starts[1:] - inputs.query_starts[:-1]).max())
        return find_bucket(self._captured, len(inputs.context_lengths), queries, int(inputs.context_lengths.max()))

    def _runner(self, bucket: Bucket) -> Callable[[], None]:
        fixed, rows = self._fixed, bucket.rows
        step, state = fixed.step(bucket), fixed.sampling(rows)

        def run() -> None:
            fixed.logits[:rows].copy_(self._model.logits(self._model.hidden(step, self._kv.layers)))
            fixed.drawn[:rows].copy_(self._sampler.draw(fixed.logits[:rows], state, Extras()))

        return run

    def _draw(self, draws: Draws, extras: Extras) -> Pending:
        """Draws again where more than rules and noise decides, and sends the results on their way."""
        rows = len(draws.rows)
        logits, drawn = self._fixed.logits[:rows], self._fixed.drawn[:rows]
        if not extras.is_plain:
            drawn.copy_(self._sampler.draw(logits, self._fixed.sampling(rows), extras))
        scores = self._sampler.score(logits, drawn, extras)
        return Pending(draws.samples, draws.counts, self._device.fetch(drawn), scores, (), self._device.mark())
