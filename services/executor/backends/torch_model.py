"""The forward pass of a Llama-like model over one flattened batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from kernels.kv_write import kv_write
from kernels.paged_attention import AttentionPlan, paged_attention
from kernels.rms_norm import rms_norm
from kernels.rope import rotate_
from kernels.silu_mul import silu_mul
from services.executor.backends.torch_kv import LayerCache
from services.executor.backends.torch_linear import Linear
from services.executor.backends.torch_parameters import LayerWeights, ModelWeights
from services.executor.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Batch:
    """T tokens, padded to P rows."""

    token_ids: Tensor  # [P] int64
    cos: Tensor  # [P, 1, head size]
    sin: Tensor  # [P, 1, head size], the first half negated
    slots: Tensor  # [T] int64: where each token's keys and values go
    attention: AttentionPlan


class LayerPass:
    """How a layer computes: what its four groups of matrices multiply, and what becomes of the products."""

    def __init__(self, spec: ModelSpec, linear: Linear) -> None:
        self._spec, self._linear = spec, linear
        self._scale = 1.0 / math.sqrt(spec.head_size)

    def attention_inputs(self, layer: LayerWeights, x: Tensor) -> Tensor:
        """What q, k and v multiply [P, H]."""
        return rms_norm(x, layer.attention_norm, self._spec.norm_epsilon)

    def mixed(self, layer: LayerWeights, normed: Tensor, batch: Batch, cache: LayerCache) -> Tensor:
        """What o multiplies [P, heads * head size]: values mixed by attention. Writes KV of the T tokens."""
        spec = self._spec
        qkv = self._linear(normed, layer.qkv, layer.qkv_bias).view(normed.shape[0], -1, spec.head_size)
        rotate_(qkv[:, : spec.head_count + spec.kv_head_count], batch.cos, batch.sin)
        kv_write(cache.hot, qkv[: batch.slots.shape[0], spec.head_count :], batch.slots)
        return paged_attention(qkv[:, : spec.head_count], cache.hot, batch.attention, self._scale, cache.colder)

    def after_attention(self, layer: LayerWeights, x: Tensor, mixed: Tensor) -> Tensor:
        """The residual stream between attention and MLP [P, H]."""
        return x + self._linear(mixed, layer.o, layer.o_bias)

    def mlp_inputs(self, layer: LayerWeights, x: Tensor) -> Tensor:
        """What gate and up multiply [P, H]."""
        return rms_norm(x, layer.mlp_norm, self._spec.norm_epsilon)

    def activated(self, layer: LayerWeights, normed: Tensor) -> Tensor:
        """What down multiplies [P, intermediate size]."""
        return silu_mul(self._linear(normed, layer.gate_up, layer.gate_up_bias))

    def after_mlp(self, layer: LayerWeights, x: Tensor, activated: Tensor) -> Tensor:
        """The layer's output [P, H]."""
        return x + self._linear(activated, layer.down, layer.down_bias)


class TorchModel:
    """Weights and how to apply them."""

    def __init__(self, spec: ModelSpec, weights: ModelWeights, linear: Linear) -> None:
        self._spec, self._weights, self._linear = spec, weights, linear
        self._layer = LayerPass(spec, linear)

    def hidden(self, batch: Batch, caches: Sequence[LayerCache], layers: int = 0) -> Tensor:
        """The last layer's output [P, H], before the final norm. Writes KV of the T tokens into one cache per layer.

        `layers`: of the first so many alone, 0 for all.
        """
        x = F.embedding(batch.token_ids, self._weights.embedding).to(self._linear.dtype)
        run = self._layer
        count = layers or len(caches)
        for layer, cache in zip(self._weights.layers[:count], caches[:count], strict=True):
            x = run.after_attention(layer, x, run.mixed(layer, run.attention_inputs(layer, x), batch, cache))
            x = run.after_mlp(layer, x, run.activated(layer, run.mlp_inputs(layer, x)))
        return x

    def normed(self, hidden: Tensor) -> Tensor:
        """Rows [R, H] of what `hidden` returned, behind the final norm."""
        return rms_norm(hidden, self._weights.final_norm, self._spec.norm_epsilon)

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 logits [R, V] of rows [R, H] of what `hidden` returned."""
        count = hidden.shape[0]
        padded = self._linear.rows.pad(count)
        if padded > count:
            hidden = F.pad(hidden, (0, 0, 0, padded - count))
        return self._linear(self.normed(hidden), self._weights.head)[:count].float()
