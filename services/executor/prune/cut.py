"""Takes rows and columns out of a layer's matrices, so that what is left computes as if the rest were zero."""

from __future__ import annotations

import torch
from torch import Tensor

from services.executor.models.spec import ModelSpec
from services.executor.prune.importance import Kept
from services.executor.quantize.layer import Layer


def cut(layer: Layer, kept: Kept, spec: ModelSpec) -> Layer:
    """The layer with only some channels and groups of heads; `spec` is the whole model's."""
    keys = _spans(kept.groups, spec.head_size)
    queries = _spans(kept.groups, spec.query_size // spec.kv_head_count)
    rows = {"q": queries, "k": keys, "v": keys, "gate": kept.channels, "up": kept.channels}
    columns = {"o": queries, "down": kept.channels}
    found = {}
    for name, values in layer.items():
        part = name.removesuffix("_bias")
        if part in rows:
            values = values[rows[part]]
        elif name in columns:
            values = values[:, columns[name]]
        found[name] = values.contiguous()
    return found


def _spans(groups: Tensor, width: int) -> Tensor:
    """Indices of all rows of some groups of so many."""
    return (groups[:, None] * width + torch.arange(width)).flatten()
