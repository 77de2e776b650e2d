"""Moves factors from the inputs of matrices into the weights: the layer computes what it did before.

Columns are multiplied, and what makes the inputs is divided: a norm's gains, the rows of v for o (where heads that
share keys and values share factors too), the rows of up for down.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from services.executor.models.spec import ModelSpec
from services.executor.quantize.layer import GROUPS, Layer

_NORMS: Mapping[str, str] = MappingProxyType({"qkv": "attention_norm", "gate_up": "mlp_norm"})
_ROWS: Mapping[str, str] = MappingProxyType({"o": "v", "down": "up"})


def shared(magnitudes: Tensor, group: str, spec: ModelSpec) -> Tensor:
    """Magnitudes of a group's inputs [K], averaged over inputs that come from the same row and share a factor."""
    if group != "o":
        return magnitudes
    by_head = magnitudes.view(spec.kv_head_count, -1, spec.head_size)
    return by_head.mean(1, keepdim=True).expand_as(by_head).reshape(-1)


def fold(layer: Layer, group: str, factors: Tensor, spec: ModelSpec, norm_dtype: torch.dtype) -> Tensor:
    """Multiplies the columns of a group's matrices by about `factors` [K]; the factors that it took.

    Gains are rounded to the type that norms are stored in, and columns get exactly what the rounded gains lack.
    Replaces tensors of the layer.
    """
    if group in _NORMS:
        gains = layer[_NORMS[group]]
        divided = (gains / factors).to(norm_dtype).float()
        usable = divided.isfinite() & (divided != 0)
        divided = torch.where(usable, divided, gains)
        taken = torch.where(divided != 0, gains / divided, torch.ones_like(gains))
        layer[_NORMS[group]] = divided
    else:
        source, taken = _ROWS[group], factors
        rows = factors
        if group == "o":
            rows = factors.view(spec.kv_head_count, -1, spec.head_size)[:, 0].reshape(-1)
        layer[source] = layer[source] / rows[:, None]
        if f"{source}_bias" in layer:
            layer[f"{source}_bias"] = layer[f"{source}_bias"] / rows
    for name in GROUPS[group]:
        layer[name] = layer[name] * taken
    return taken
