"""The cuda backend: fused Triton kernels, decode steps that are captured and begun ahead, drawing on the device.

It keeps the contract of all backends; on a CPU it runs under Triton's interpreter, slowly, for tests. With `fixed
splits` a token's bits do not depend on its batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor

from kernels.token_sampler import score_tokens
from services.executor.backends.base import (
    KvShape,
    PooledRows,
    PromptScoreRows,
    SampleRow,
    SamplingRule,
    StepInputs,
    StepOutputs,
)
from services.executor.backends.cuda.buckets import Bucket, buckets
from services.executor.backends.cuda.decode import DecodeSteps
from services.executor.backends.cuda.device import Device
from services.executor.backends.cuda.draws import Draws, plan_draws
from services.executor.backends.cuda.kv import GpuKv
from services.executor.backends.cuda.memory_layout import send
from services.executor.backends.cuda.model import ATTENTION_SPLIT, GpuModel, Hidden
from services.executor.backends.cuda.results import HostScores, Pending
from services.executor.backends.cuda.sampler import Sampler
from services.executor.backends.cuda.step_arrays import FixedStep, send_step
from services.executor.backends.cuda.weights import GpuWeights
from services.executor.kv_bytes import KvDims, block_bytes
from services.executor.models.spec import ModelSpec

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_LOGIT_ROWS = 64  # rows of prompt scores whose logits exist at a time
_MOST_ROWS = 256  # of captured steps with drafts


@dataclass(frozen=True, slots=True)
class StepSizes:
    """The most that steps compute."""

    sequences: int = 64
    tokens: int = 512
    queries: int = 1  # tokens of one sequence in a captured step: one, and its drafts


class CudaBackend:
    """A model on a GPU. Not thread-safe."""

    name = "cuda"

    def __init__(
        self,
        spec: ModelSpec,
        weights: GpuWeights,
        device: Device,
        *,
        dtype: str,
        kv_format: str,
        sizes: StepSizes,
        fixed_splits: bool,
    ) -> None:
        """`dtype` is what is computed in, `kv_format` that of hot blocks: fp32, bf16 or fp16.

        `fixed_splits`: attention is cut by context alone; the matrices of `weights` say the same of their sums.
        """
        self.spec, self.kv_format, self.dtype = spec, kv_format, weights.formats
        self.device = device.name
        cut = f"cut at {ATTENTION_SPLIT}" if fixed_splits else "cut as batches want"
        versions = f"torch {torch.__version__} triton {triton.__version__}"
        self.numerics = f"cuda {versions} {device.name} {weights.formats} in {dtype} kv {kv_format} {cut}"
        self._device, self._sizes, self._kv_dtype = device, sizes, DTYPES[kv_format]
        self._model = GpuModel(spec, weights, ATTENTION_SPLIT if fixed_splits else None, device.torch_device)
        self._sampler = Sampler(spec.vocab_size, device)
        self._kv: GpuKv | None = None
        self._decode: DecodeSteps | None = None

    @property
    def computes_from_host_memory(self) -> bool:
        return self._device.torch_device.type == "cpu"

    def device_memory(self) -> int | None:
        """Tries what needs the most memory first, to see what is left."""
        free = self._device.free_memory()
        if free is None:
            return None
        with torch.inference_mode(), self._device.computing():
            needed = self._tried(free)
        self._device.free_memory()  # what was tried goes back
        return max(free - needed, 0)

    def kv_block_bytes(self, block_size: int, kv_format: str | None = None) -> int:
        spec = self.spec
        dims = KvDims(spec.layer_count, spec.kv_head_count, spec.head_size, spec.head_size)
        return block_bytes(dims, kv_format or self.kv_format, block_size)

    def allocate_kv(self, shape: KvShape) -> None:
        with torch.inference_mode(), self._device.computing():
            self._kv, self._decode = self._allocate(shape)
            self._decode.capture(self._captured_sizes())

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        with torch.inference_mode(), self._device.computing():
            self._allocated()[0].copy(pairs)

    def demote_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        with torch.inference_mode(), self._device.computing():
            self._allocated()[0].demote(pairs)

    def read_block(self, block_id: int) -> memoryview:
        with torch.inference_mode():
            return self._allocated()[0].read_block(block_id)

    def write_block(self, block_id: int, block: memoryview) -> None:
        with torch.inference_mode():
            self._allocated()[0].write_block(block_id, block)

    def host_memory(self, byte_count: int) -> NDArray[np.uint8]:
        memory: NDArray[np.uint8] = self._device.host_memory((byte_count,), torch.uint8).numpy()
        return memory

    def step(self, inputs: StepInputs) -> StepOutputs:
        kv, decode = self._allocated()
        with torch.inference_mode(), self._device.computing():
            pending = decode.take(inputs)
            if pending is None:
                draws = plan_draws(inputs.samples, inputs.masks)
                pending = decode.begin(inputs, draws) or self._begin(kv, inputs, draws)
            decode.begin_next()
            return pending.outputs()

    def logits(self, inputs: StepInputs, rows: Sequence[int]) -> NDArray[np.float32]:
        kv, decode = self._allocated()
        with torch.inference_mode(), self._device.computing():
            decode.forget()
            step, _, _ = send_step(self._device, inputs, plan_draws((), None), kv.block_size)
            hidden = self._model.hidden(step, kv.layers, inputs.layers)
            found = self._device.fetch(self._model.logits(hidden.take(self._rows(rows))))
            self._device.mark().wait()
            logits: NDArray[np.float32] = found.numpy()
            return logits

    def captured_step(self, sequences: int, queries: int, context: int) -> Callable[[], None]:
        """The captured step that serves such batches, to be measured. ValueError where there is none."""
        return torch.inference_mode()(self._allocated()[1].captured_step(sequences, queries, context))

    def _allocated(self) -> tuple[GpuKv, DecodeSteps]:
        if self._kv is None or self._decode is None:
            raise RuntimeError("allocate_kv comes before the first step")
        return self._kv, self._decode

    def _allocate(self, shape: KvShape) -> tuple[GpuKv, DecodeSteps]:
        kv = GpuKv(self.spec, shape, self._kv_dtype, self._device)
        fixed = FixedStep(
            self._device,
            rows=max(bucket.rows for bucket in self._captured_sizes()),
            sequences=self._sizes.sequences,
            context=self.spec.context_length,
            block_size=shape.block_size,
            vocabulary=self.spec.vocab_size,
        )
        return kv, DecodeSteps(self._model, kv, self._sampler, self._device, fixed, self.spec.context_length)

    def _captured_sizes(self) -> list[Bucket]:
        found = buckets(self._sizes.sequences, self._sizes.queries, self.spec.context_length)
        return [bucket for bucket in found if bucket.queries == 1 or bucket.rows <= _MOST_ROWS]

    def _begin(self, kv: GpuKv, inputs: StepInputs, draws: Draws) -> Pending:
        """A step of any kind, kernel by kernel."""
        step, rows, state = send_step(self._device, inputs, draws, kv.block_size)
        hidden = self._model.hidden(step, kv.layers, inputs.layers)
        drawn = scores = None
        if len(draws.rows):
            logits = self._model.logits(hidden.take(rows))
            extras = self._sampler.extras(draws)
            on_device = self._sampler.draw(logits, state, extras)
            scores = self._sampler.score(logits, on_device, extras)
            drawn = self._device.fetch(on_device)
        prompt_scores = [(wanted, self._score_prompt(hidden, wanted)) for wanted in inputs.prompt_scores]
        pooled = [(part, self._device.fetch(self._states(hidden, part))) for part in inputs.pooled]
        return Pending(draws.samples, draws.counts, drawn, scores, prompt_scores, self._device.mark(), pooled)

    def _states(self, hidden: Hidden, part: PooledRows) -> Tensor:
        """States behind the last norm [count, H] fp32."""
        rows = self._rows(range(part.first_row, part.first_row + part.count))
        return self._model.states(hidden.take(rows))

    def _score_prompt(self, hidden: Hidden, wanted: PromptScoreRows) -> list[HostScores]:
        found = []
        for start in range(0, len(wanted.targets), _LOGIT_ROWS):
            targets = np.array(wanted.targets[start : start + _LOGIT_ROWS], np.int32)
            first = wanted.first_row + start
            logits = self._model.logits(hidden.take(self._rows(range(first, first + len(targets)))))
            on_device = send(self._device, {"targets": targets})["targets"]
            found.append(HostScores.fetch(self._device, score_tokens(logits, on_device, wanted.count)))
        return found

    def _rows(self, rows: Sequence[int]) -> Tensor:
        return send(self._device, {"rows": np.array(rows, np.int64)})["rows"]

    def _tried(self, free: int) -> int:
        """Bytes that the largest steps take; `free` are there before."""
        size, tokens = 16, min(self._sizes.tokens, self.spec.context_length)
        kv, decode = self._allocate(KvShape(size, self.kv_block_bytes(size), -(-tokens // size)))
        taken = self._device.most_taken(lambda: self._try_prefill(kv, tokens))
        decode.capture(self._captured_sizes()[:1])
        # Together with the blocks tried, which are few.
        return taken + free - (self._device.free_memory() or 0)

    def _try_prefill(self, kv: GpuKv, tokens: int) -> None:
        """The longest step there is: a sequence's tokens scored as a prompt's, and all the tokens that a step may draw.

        They draw as drafts do, under penalties: that takes the most memory of all.
        """
        drawn = min(self._sizes.sequences * self._sizes.queries, tokens)
        rule = SamplingRule(temperature=1.0, frequency_penalty=1.0, logprob_count=0)
        inputs = StepInputs(
            token_ids=np.zeros(tokens, np.int32),
            positions=np.arange(tokens, dtype=np.int32),
            query_starts=np.array([0, tokens], np.int32),
            context_lengths=np.array([tokens], np.int32),
            block_tables=np.arange(-(-tokens // kv.block_size), dtype=np.int32)[None],
            samples=[SampleRow(0, rule, [0], [], draft_ids=[0] * (drawn - 1))],
            prompt_scores=[PromptScoreRows(0, [0] * min(tokens, _LOGIT_ROWS), 0)],
        )
        self._begin(kv, inputs, plan_draws(inputs.samples, None)).outputs()
