"""One layer's weights in fp32, and which of its matrices multiply the same inputs."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from services.executor.backends.torch_parameters import LayerWeights
from services.executor.models.spec import ModelSpec
from services.executor.models.weights import Checkpoint, expected_shapes
from services.executor.quantize.finite import read_tensor

Layer = dict[str, Tensor]
"""Tensors by their names within the layer: attention_norm, q, q_bias, ..."""

GROUPS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"qkv": ("q", "k", "v"), "o": ("o",), "gate_up": ("gate", "up"), "down": ("down",)}
)
"""Matrices that multiply the same inputs, in the order of computing."""


def layer_names(spec: ModelSpec, index: int) -> list[str]:
    """All tensors of a layer, by their names within it."""
    prefix = f"layers.{index}."
    return [name.removeprefix(prefix) for name in expected_shapes(spec) if name.startswith(prefix)]


def matrix_names(spec: ModelSpec) -> list[str]:
    """Canonical names of every matrix that is quantized: all but the embedding and the head."""
    return [name for name, shape in expected_shapes(spec).items() if len(shape) == 2 and name.startswith("layers.")]


def read_layer(checkpoint: Checkpoint, index: int) -> Layer:
    """Reads one layer. Raises MODEL_LOAD_FAILED where a number is not finite."""
    return {name: read_tensor(checkpoint, f"layers.{index}.{name}") for name in layer_names(checkpoint.spec, index)}


def joined(layer: Layer) -> LayerWeights:
    """The layer as the torch backend computes with it."""

    def stack(group: str, ending: str = "") -> Tensor | None:
        parts = [layer[name + ending] for name in GROUPS[group] if name + ending in layer]
        return torch.cat(parts) if len(parts) > 1 else parts[0] if parts else None

    def matrix(group: str) -> Tensor:
        found = stack(group)
        assert found is not None
        return found

    return LayerWeights(
        attention_norm=layer["attention_norm"],
        qkv=matrix("qkv"),
        qkv_bias=stack("qkv", "_bias"),
        o=matrix("o"),
        o_bias=stack("o", "_bias"),
        mlp_norm=layer["mlp_norm"],
        gate_up=matrix("gate_up"),
        gate_up_bias=stack("gate_up", "_bias"),
        down=matrix("down"),
        down_bias=stack("down", "_bias"),
    )
