"""The torch backend: plain PyTorch on any device; the truth that other backends are tested against.

In fp32 on a CPU, a token's logits depend on its own sequence alone, bit for bit: neither on neighbours nor on how the
prompt was cut into chunks. In bf16 and fp16 there is no such promise.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.paged_attention import plan_attention
from services.executor.backends.base import (
    KvShape,
    PooledRows,
    PromptScoreRows,
    StepInputs,
    StepOutputs,
    TokenScores,
)
from services.executor.backends.torch_kv import TorchKv
from services.executor.backends.torch_linear import (
    ExactLinear,
    Linear,
    NativeLinear,
    WideningLinear,
    multiplies_bf16,
)
from services.executor.backends.torch_model import Batch, TorchModel
from services.executor.backends.torch_parameters import ModelWeights
from services.executor.backends.torch_rows import find_row_sizes
from services.executor.kv_bytes import KvDims, block_bytes
from services.executor.models.rope import inverse_frequencies, rotation_table
from services.executor.models.spec import ModelSpec
from services.executor.sampling.draw import single_rows
from services.executor.sampling.torch_sampler import sample, score_prompt

if TYPE_CHECKING:
    from services.executor.models.weights import Checkpoint

log = logging.getLogger("quire.executor")

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_FREE_SHARE = 8  # one part in so many of a GPU's memory is left to steps
_LOGIT_ROWS = 64  # rows of prompt scores whose logits exist at a time


class TorchBackend:
    """A model in torch. Not thread-safe."""

    name = "torch"

    def __init__(
        self, spec: ModelSpec, weights: ModelWeights, linear: Linear, dtype: str, device: torch.device
    ) -> None:
        self.spec, self.dtype, self.kv_format = spec, dtype, dtype
        self._device, self._linear = device, linear
        self._model = TorchModel(spec, weights, linear)
        frequencies = inverse_frequencies(spec.head_size, spec.rope_theta, spec.rope_scaling)
        cos, sin = rotation_table(frequencies, spec.context_length)
        self._cos, self._sin = torch.from_numpy(cos).to(device), torch.from_numpy(sin).to(device)
        self._kv: TorchKv | None = None
        capability = torch.backends.cpu.get_cpu_capability().lower()
        self.device = f"cpu {capability}" if device.type == "cpu" else torch.cuda.get_device_name(device)
        rows = ",".join(map(str, linear.rows.sizes)) if isinstance(linear, ExactLinear) else "any"
        self.numerics = f"torch {torch.__version__} {self.device} {dtype} rows {rows}"

    @classmethod
    def load(
        cls, checkpoint: Checkpoint, *, dtype: str, threads: int, context_length: int | None, device: str = "auto"
    ) -> TorchBackend:
        """Loads a model.

        `dtype` is fp32, bf16, fp16 or auto (bf16 where the device multiplies it, else fp32), `threads` 0 leaves torch's
        setting, `device` is auto, cpu or cuda. Raises MODEL_LOAD_FAILED, or INVALID_FIELD for a context length beyond
        the model's.
        """
        # Imported here: a model whose weights are given needs nothing that reads files.
        from services.executor.backends.torch_weights import load_weights
        from services.executor.models.checkpoint import with_context_length

        if threads:
            torch.set_num_threads(threads)
        place = torch.device(device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu")
        if dtype == "auto":
            dtype = "bf16" if place.type != "cpu" or multiplies_bf16() else "fp32"
        spec = with_context_length(checkpoint.spec, context_length)
        narrow_on_cpu = place.type == "cpu" and dtype != "fp32" and not (dtype == "bf16" and multiplies_bf16())
        vector_dtype = torch.float32 if narrow_on_cpu else _DTYPES[dtype]
        with torch.inference_mode():
            weights = load_weights(checkpoint, _DTYPES[dtype], vector_dtype, place)
            linear: Linear
            if place.type == "cpu" and dtype == "fp32":
                layer = weights.layers[0]
                matrices = (layer.qkv, layer.o, layer.gate_up, layer.down, weights.head)
                linear = ExactLinear(find_row_sizes(matrices, spec.head_size))
            else:
                linear = WideningLinear() if narrow_on_cpu else NativeLinear(_DTYPES[dtype])
            return cls(spec, weights, linear, dtype, place)

    def device_memory(self) -> int | None:
        if self._device.type == "cpu":
            return None
        free, _ = torch.cuda.mem_get_info(self._device)
        return free - free // _FREE_SHARE

    def kv_block_bytes(self, block_size: int, kv_format: str | None = None) -> int:
        spec = self.spec
        dims = KvDims(spec.layer_count, spec.kv_head_count, spec.head_size, spec.head_size)
        return block_bytes(dims, kv_format or self.kv_format, block_size)

    def allocate_kv(self, shape: KvShape) -> None:
        self._kv = TorchKv(self.spec, shape, _DTYPES[self.dtype], self._device)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._allocated().copy(pairs)

    def demote_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        with torch.inference_mode():
            self._allocated().demote(pairs)

    @property
    def computes_from_host_memory(self) -> bool:
        return self._device.type == "cpu"

    def read_block(self, block_id: int) -> memoryview:
        return self._allocated().read_block(block_id)

    def write_block(self, block_id: int, block: memoryview) -> None:
        self._allocated().write_block(block_id, block)

    def host_memory(self, byte_count: int) -> NDArray[np.uint8]:
        memory: NDArray[np.uint8] = torch.empty(
            byte_count, dtype=torch.uint8, pin_memory=self._device.type == "cuda"
        ).numpy()
        return memory

    def step(self, inputs: StepInputs) -> StepOutputs:
        with torch.inference_mode():
            hidden = self._model.hidden(self._batch(inputs), self._allocated().layers, inputs.layers)
            for part in inputs.pooled:
                self._pool(hidden, part)
            sampled = []
            if inputs.samples:
                singles = single_rows(inputs.samples, inputs.masks)
                rows = torch.tensor([row.row for row in singles], device=self._device)
                logits = self._model.logits(hidden.index_select(0, rows))
                if inputs.masks is not None:
                    inputs.masks.wait()
                sampled = sample(logits, singles)
            return StepOutputs(sampled, [self._score(hidden, wanted) for wanted in inputs.prompt_scores])

    def logits(self, inputs: StepInputs, rows: Sequence[int]) -> NDArray[np.float32]:
        with torch.inference_mode():
            hidden = self._model.hidden(self._batch(inputs), self._allocated().layers, inputs.layers)
            wanted = torch.tensor(rows, dtype=torch.int64, device=self._device)
            found: NDArray[np.float32] = self._model.logits(hidden.index_select(0, wanted)).cpu().numpy()
            return found

    def _allocated(self) -> TorchKv:
        if self._kv is None:
            raise RuntimeError("allocate_kv comes before the first step")
        return self._kv

    def _batch(self, inputs: StepInputs) -> Batch:
        spec, kv = self.spec, self._allocated()
        block_size = kv.block_size
        count = len(inputs.token_ids)
        rows = self._linear.rows
        padding = (0, rows.pad(count) - count)
        ids = torch.from_numpy(np.pad(inputs.token_ids, padding).astype(np.int64)).to(self._device)
        positions = torch.from_numpy(np.pad(inputs.positions, padding).astype(np.int64)).to(self._device)
        cos, sin = self._cos.index_select(0, positions), self._sin.index_select(0, positions)
        owners = np.repeat(np.arange(len(inputs.context_lengths)), np.diff(inputs.query_starts))
        blocks = inputs.block_tables[owners, inputs.positions // block_size].astype(np.int64)
        return Batch(
            token_ids=ids,
            cos=torch.cat((cos, cos), -1).unsqueeze(1).to(self._linear.dtype),
            sin=torch.cat((-sin, sin), -1).unsqueeze(1).to(self._linear.dtype),
            slots=torch.from_numpy(blocks * block_size + inputs.positions % block_size).to(self._device),
            attention=plan_attention(
                inputs.query_starts,
                inputs.context_lengths,
                inputs.block_tables,
                block_size=block_size,
                pool_starts=kv.starts,
                heads=spec.head_count,
                kv_heads=spec.kv_head_count,
                pad_rows=rows.pad,
                max_rows=rows.largest,
                device=self._device,
            ),
        )

    def _pool(self, hidden: Tensor, part: PooledRows) -> None:
        states = self._model.normed(hidden[part.first_row : part.first_row + part.count])
        for row in states.double().cpu().numpy():  # in order: a sum must not depend on chunks
            part.total += row

    def _score(self, hidden: Tensor, wanted: PromptScoreRows) -> TokenScores:
        scores = TokenScores([], [], [], [])
        for start in range(0, len(wanted.targets), _LOGIT_ROWS):
            targets = wanted.targets[start : start + _LOGIT_ROWS]
            first = wanted.first_row + start
            part = score_prompt(self._model.logits(hidden[first : first + len(targets)]), targets, wanted.count)
            scores.chosen += part.chosen
            scores.ranks += part.ranks
            scores.top_ids += part.top_ids
            scores.top_logprobs += part.top_logprobs
        return scores
