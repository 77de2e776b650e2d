"""A layer in plain operations of torch, through which gradients flow: whole sequences, no cache, fp32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from services.executor.models.rope import inverse_frequencies, rotation_table
from services.executor.models.spec import ModelSpec
from services.executor.quantize.layer import GROUPS, Layer

Look = Callable[[str, Tensor, tuple[Tensor, ...]], object]
"""Called with a group, its inputs [S, T, K] and the outputs [S, T, N] of each of its matrices."""


@dataclass(frozen=True, slots=True)
class Angles:
    """Of rotary positions: cosines and signed sines [T, head size]."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def of(cls, spec: ModelSpec, length: int) -> Angles:
        cos, sin = rotation_table(inverse_frequencies(spec.head_size, spec.rope_theta, spec.rope_scaling), length)
        half_cos, half_sin = torch.from_numpy(cos), torch.from_numpy(sin)
        return cls(torch.cat((half_cos, half_cos), -1), torch.cat((-half_sin, half_sin), -1))

    def rotated(self, x: Tensor) -> Tensor:
        """Queries or keys [S, heads, T, head size]."""
        return x * self.cos + x.roll(x.shape[-1] // 2, -1) * self.sin


def run_layer(layer: Layer, spec: ModelSpec, angles: Angles, x: Tensor, look: Look | None = None) -> Tensor:
    """The residual stream [S, T, H] behind a layer. Heads and widths are those of the layer's own matrices."""

    def product(group: str, inputs: Tensor) -> tuple[Tensor, ...]:
        outputs = tuple(F.linear(inputs, layer[name], layer.get(f"{name}_bias")) for name in GROUPS[group])
        if look is not None:
            look(group, inputs, outputs)
        return outputs

    samples, length, hidden = x.shape
    normed = F.rms_norm(x, (hidden,), layer["attention_norm"], spec.norm_epsilon)
    q, k, v = (part.view(samples, length, -1, spec.head_size).transpose(1, 2) for part in product("qkv", normed))
    q, k = angles.rotated(q), angles.rotated(k)
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    x = x + product("o", mixed.transpose(1, 2).reshape(samples, length, -1))[0]
    gate, up = product("gate_up", F.rms_norm(x, (hidden,), layer["mlp_norm"], spec.norm_epsilon))
    return x + product("down", F.silu(gate) * up)[0]


def logits(hidden: Tensor, final_norm: Tensor, head: Tensor, spec: ModelSpec) -> Tensor:
    """[..., V] of what leaves the last layer [..., H]."""
    return F.linear(F.rms_norm(hidden, (spec.hidden_size,), final_norm, spec.norm_epsilon), head)
