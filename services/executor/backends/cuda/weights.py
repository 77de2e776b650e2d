"""A model's weights on the device, in the formats of the kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from services.executor.backends.cuda.matrices import Matrix


@dataclass(frozen=True, slots=True)
class GpuLayer:
    """One layer; biases lie in the matrices."""

    attention_norm: Tensor  # fp32
    qkv: Matrix  # queries, then keys, then values
    o: Matrix
    mlp_norm: Tensor  # fp32
    gate_up: Matrix  # gate, then up
    down: Matrix


@dataclass(frozen=True, slots=True)
class GpuWeights:
    """All of it. `formats` names those of the matrices, for people: the one with the most weights first."""

    embedding: Tensor  # [vocabulary, hidden] in the type that is computed in
    layers: Sequence[GpuLayer]
    final_norm: Tensor  # fp32
    head: Matrix
    formats: str

    @property
    def nbytes(self) -> int:
        """Bytes that a decode step reads."""
        matrices = [self.head] + [part for one in self.layers for part in (one.qkv, one.o, one.gate_up, one.down)]
        return sum(matrix.nbytes for matrix in matrices)
