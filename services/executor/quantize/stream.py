"""Calibration text on its way through the model: what enters one layer, then the next."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.paged_attention import plan_attention
from services.executor.backends.torch_kv import LayerCache
from services.executor.backends.torch_linear import NativeLinear
from services.executor.backends.torch_model import Batch, LayerPass
from services.executor.backends.torch_parameters import LayerWeights
from services.executor.models.dequantize import to_float32
from services.executor.models.rope import inverse_frequencies, rotation_table
from services.executor.models.spec import ModelSpec
from services.executor.models.weights import Checkpoint, StoredTensor
from services.executor.quantize.finite import check_read
from services.executor.quantize.layer import GROUPS, Layer, joined

See = Callable[[Tensor], object]
"""Called with inputs of matrices, fp32 [some rows, K], that it must not keep."""

_CHUNK_TOKENS = 2048
_BLOCK_SIZE = 64


class CalibrationStream:
    """The residual stream of S sequences of T tokens before a layer, which moves it on one group of matrices a time.

    What attention mixed is kept between two groups; all else is computed again when it is needed, a few sequences at
    a time.
    """

    def __init__(self, spec: ModelSpec, hidden: Tensor, computing: _Chunks | None = None) -> None:
        """`hidden` [S, T, H] fp32 is changed in place."""
        self.hidden = hidden
        self._spec = spec
        self._compute = computing or _Chunks(spec, hidden.shape[1])
        self._mixed: Tensor | None = None

    def visit(self, group: str, layer: Layer, see: See) -> None:
        """Shows all inputs of a group of matrices. Groups are visited in their order, with those before as they end."""
        weights, run = joined(layer), self._compute.run
        for rows, x in self._chunks():
            match group:
                case "qkv":
                    see(run.attention_inputs(weights, x))
                case "o":
                    mixed = self._compute.mixed(weights, x)
                    self._keep_mixed(rows, mixed)
                    see(mixed)
                case "gate_up":
                    assert self._mixed is not None
                    x[:] = run.after_attention(weights, x, self._mixed[rows].flatten(0, 1))
                    see(run.mlp_inputs(weights, x))
                case "down":
                    see(run.activated(weights, run.mlp_inputs(weights, x)))
        if group == "gate_up":
            self._mixed = None

    def finish(self, layer: Layer) -> None:
        """After the visit of gate and up: the stream leaves the layer."""
        weights, run = joined(layer), self._compute.run
        for _, x in self._chunks():
            x[:] = run.after_mlp(weights, x, run.activated(weights, run.mlp_inputs(weights, x)))

    def pass_through(self, layer: Layer) -> None:
        """The whole layer at once."""
        weights = joined(layer)
        for _, x in self._chunks():
            x[:] = self._compute.output(weights, x)

    def observe(self, layer: Layer, see: dict[str, See]) -> None:
        """Shows the inputs of some groups while the stream stays where it is."""
        for rows, _ in self._chunks():
            part = CalibrationStream(self._spec, self.hidden[rows].clone(), self._compute)
            for group in GROUPS:
                part.visit(group, layer, see.get(group, _ignore))

    def _chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """Some sequences, and their rows of the stream [rows, H]: the same memory."""
        count, _, width = self.hidden.shape
        step = self._compute.sequences
        for start in range(0, count, step):
            rows = slice(start, min(start + step, count))
            yield rows, self.hidden[rows].view(-1, width)

    def _keep_mixed(self, rows: slice, mixed: Tensor) -> None:
        if self._mixed is None:
            self._mixed = torch.empty(*self.hidden.shape[:2], mixed.shape[1])
        self._mixed[rows] = mixed.view(-1, *self._mixed.shape[1:])


class _Chunks:
    """Computes a layer for a few sequences of T tokens that begin at position 0."""

    def __init__(self, spec: ModelSpec, length: int) -> None:
        self._spec, self._length = spec, length
        self.run = LayerPass(spec, NativeLinear(torch.float32))
        self.sequences = max(1, _CHUNK_TOKENS // length)
        self._blocks = -(-length // _BLOCK_SIZE)
        size = (2 * spec.kv_head_count, self.sequences * self._blocks, _BLOCK_SIZE, spec.head_size)
        self._cache = LayerCache(torch.zeros(size), [])
        cos, sin = rotation_table(inverse_frequencies(spec.head_size, spec.rope_theta, spec.rope_scaling), length)
        self._cos, self._sin = torch.from_numpy(cos), torch.from_numpy(sin)
        self._batch = lru_cache(maxsize=2)(self._make_batch)  # whole chunks, and the last one

    def mixed(self, weights: LayerWeights, x: Tensor) -> Tensor:
        batch = self._batch(len(x) // self._length)
        return self.run.mixed(weights, self.run.attention_inputs(weights, x), batch, self._cache)

    def output(self, weights: LayerWeights, x: Tensor) -> Tensor:
        x = self.run.after_attention(weights, x, self.mixed(weights, x))
        return self.run.after_mlp(weights, x, self.run.activated(weights, self.run.mlp_inputs(weights, x)))

    def _make_batch(self, count: int) -> Batch:
        spec, length = self._spec, self._length
        table = np.arange(count * self._blocks, dtype=np.int32).reshape(count, -1)
        slots = table[:, :1].astype(np.int64) * _BLOCK_SIZE + np.arange(length)
        cos, sin = self._cos.repeat(count, 1), self._sin.repeat(count, 1)
        return Batch(
            token_ids=torch.empty(0, dtype=torch.int64),  # the stream is beyond the embedding
            cos=torch.cat((cos, cos), -1).unsqueeze(1),
            sin=torch.cat((-sin, sin), -1).unsqueeze(1),
            slots=torch.from_numpy(slots.reshape(-1)),
            attention=plan_attention(
                np.arange(0, count * length + 1, length, dtype=np.int32),
                np.full(count, length, np.int32),
                table,
                block_size=_BLOCK_SIZE,
                heads=spec.head_count,
                kv_heads=spec.kv_head_count,
            ),
        )


def embed(checkpoint: Checkpoint, tokens: NDArray[np.int32]) -> Tensor:
    """What enters the first layer [S, T, H] for tokens [S, T]; only their rows of the embedding are read.

    Raises MODEL_LOAD_FAILED where a number is not finite.
    """
    embedding = checkpoint.tensor("embedding")
    used, places = np.unique(tokens, return_inverse=True)
    if isinstance(embedding, StoredTensor):
        shape = (len(used), embedding.shape[1])
        rows = to_float32(StoredTensor(embedding.name, shape, embedding.format, embedding.data[used]))
    else:
        rows = np.concatenate([embedding.read(row, row + 1).dequantize() for row in used.tolist()])
    check_read("embedding", rows)
    return torch.from_numpy(rows[places.reshape(tokens.shape)])


def _ignore(inputs: Tensor) -> None:
    """Of groups that nobody looks at."""
