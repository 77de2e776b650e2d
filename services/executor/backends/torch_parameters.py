"""A model's weights in torch: parts that are used together lie together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. Matrices are [output, input]."""

    attention_norm: Tensor
    qkv: Tensor  # queries, then keys, then values
    qkv_bias: Tensor | None
    o: Tensor
    o_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor  # gate, then up
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True)
class ModelWeights:
    embedding: Tensor  # [vocabulary, hidden]
    layers: Sequence[LayerWeights]
    final_norm: Tensor
    head: Tensor  # [vocabulary, hidden]; the embedding itself where tied
