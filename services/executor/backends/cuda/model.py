"""The forward pass of a Llama-like model over one flattened batch, in fused kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.activations import ActivationFormat, Quantized
from kernels.paged_attention import AttentionRule, MixedBatch, PagedKv, mixed_attention
from kernels.rms_norm import add_rms_norm
from kernels.rope_kv_write import rope_kv_write
from kernels.silu_mul import gate_mul
from services.executor.backends.cuda.matrices import rounded
from services.executor.backends.cuda.weights import GpuWeights
from services.executor.models.rope import inverse_frequencies, rotation_table
from services.executor.models.spec import ModelSpec

ATTENTION_SPLIT = 512
PRODUCT_SPLIT = 1024
"""Tokens, columns: where sums are cut when a token's bits may not depend on its batch."""


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """T tokens of a step, on the device."""

    tokens: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    slots: Tensor  # [T] int64: where keys and values go; below 0: nowhere
    batch: MixedBatch


@dataclass(frozen=True, slots=True)
class Hidden:
    """What layers give: the stream [T, H], but for what the last one adds to it."""

    stream: Tensor
    last: Tensor

    def take(self, rows: Tensor) -> Hidden:
        """Some rows [R] int64."""
        return Hidden(self.stream.index_select(0, rows), self.last.index_select(0, rows))


class GpuModel:
    """Weights and how to apply them."""

    def __init__(self, spec: ModelSpec, weights: GpuWeights, attention_split: int | None, device: torch.device) -> None:
        """`attention_split`: contexts are cut at multiples of it; None: as the batch wants it."""
        self._spec, self._weights, self._split = spec, weights, attention_split
        self._rule = AttentionRule(1.0 / math.sqrt(spec.head_size))
        cos, sin = rotation_table(
            inverse_frequencies(spec.head_size, spec.rope_theta, spec.rope_scaling), spec.context_length
        )
        self._cos, self._sin = torch.from_numpy(cos).to(device), torch.from_numpy(sin).to(device)

    def hidden(self, step: DeviceStep, caches: Sequence[PagedKv], layers: int = 0) -> Hidden:
        """Runs the layers and writes KV of the T tokens. `layers`: the first so many alone, 0 for all."""
        spec = self._spec
        stream, last = F.embedding(step.tokens, self._weights.embedding), None
        count = layers or spec.layer_count
        for layer, cache in zip(self._weights.layers[:count], caches[:count], strict=True):
            normed = self._normed(stream, last, layer.attention_norm, layer.qkv.takes)
            qkv = layer.qkv(normed).view(len(stream), -1, spec.head_size)
            rope_kv_write(qkv, self._cos, self._sin, step.positions, step.slots, cache.hot)
            queries = qkv[:, : spec.head_count]
            mixed = mixed_attention(queries, cache, step.batch, self._rule, fixed_split=self._split)
            added = layer.o(rounded(mixed, layer.o.takes))
            normed = add_rms_norm(added, stream, layer.mlp_norm, spec.norm_epsilon, layer.gate_up.takes)
            last = layer.down(gate_mul(layer.gate_up(normed), "silu", layer.down.takes))
        assert last is not None
        return Hidden(stream, last)

    def logits(self, hidden: Hidden) -> Tensor:
        """fp32 logits [R, V]; `hidden` is used up."""
        head = self._weights.head
        return head(self._normed(hidden.stream, hidden.last, self._weights.final_norm, head.takes)).float()

    def states(self, hidden: Hidden) -> Tensor:
        """fp32 states behind the last norm [R, H]; `hidden` is used up."""
        normed = self._normed(hidden.stream, hidden.last, self._weights.final_norm, None)
        assert isinstance(normed, Tensor)
        return normed.float()

    def _normed(
        self, stream: Tensor, last: Tensor | None, weight: Tensor, takes: ActivationFormat | None
    ) -> Tensor | Quantized:
        x, residual = (stream, None) if last is None else (last, stream)
        return add_rms_norm(x, residual, weight, self._spec.norm_epsilon, takes)
