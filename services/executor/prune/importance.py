"""What each layer, each MLP channel and each group of heads adds to the residual stream, on calibration text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from services.executor.models.spec import ModelSpec
from services.executor.models.weights import Checkpoint
from services.executor.quantize.differentiable import Angles, run_layer
from services.executor.quantize.finite import check_computed
from services.executor.quantize.layer import Layer, read_layer
from services.executor.quantize.stream import embed


@dataclass(frozen=True, slots=True)
class LayerImportance:
    """Of one layer and its parts."""

    layer: float  # 1 - the cosine between what enters and what leaves, mean over tokens (Men et al. 2024, ShortGPT)
    channels: Tensor  # [intermediate size]: energy at the residual stream (Muralidharan et al. 2024, Minitron)
    groups: Tensor  # [KV heads]: the same, of the heads that share keys and values


@dataclass(frozen=True, slots=True)
class Measured:
    """Of a whole model."""

    layers: list[LayerImportance]
    hidden: Tensor  # [S, T, H]: what leaves the last layer


@dataclass(frozen=True, slots=True)
class Kept:
    """What is left of one layer; indices in their own order."""

    index: int  # of the layer in the source
    channels: Tensor  # [smaller intermediate size]
    groups: Tensor  # [fewer KV heads]


def measure(checkpoint: Checkpoint, tokens: NDArray[np.int32], done: Callable[[int], object]) -> Measured:
    """For tokens [S, T]. Calls `done(1)` after each layer. Raises MODEL_LOAD_FAILED and NOT_FINITE."""
    spec, angles = checkpoint.spec, Angles.of(checkpoint.spec, tokens.shape[1])
    hidden = embed(checkpoint, tokens)
    found = []
    with torch.no_grad():
        for index in range(spec.layer_count):
            layer = read_layer(checkpoint, index)
            parts = _Parts(layer, spec)
            turned = 0.0
            for x in torch.split(hidden, 1):
                out = run_layer(layer, spec, angles, x, parts.look)
                turned += float((1 - F.cosine_similarity(x, out, dim=-1)).mean())
                x[:] = out
            check_computed(f"what leaves layer {index}", hidden)
            found.append(LayerImportance(turned / len(hidden), parts.channels(), parts.groups()))
            done(1)
    return Measured(found, hidden)


def choose(importance: list[LayerImportance], smaller: ModelSpec) -> list[Kept]:
    """The most important of everything, as much as `smaller` has."""
    layers = torch.tensor([own.layer for own in importance], dtype=torch.float64)
    return [
        Kept(
            index,
            _largest(importance[index].channels, smaller.intermediate_size),
            _largest(importance[index].groups, smaller.kv_head_count),
        )
        for index in _largest(layers, smaller.layer_count).tolist()
    ]


class _Parts:
    """Sums over the tokens of one layer."""

    def __init__(self, layer: Layer, spec: ModelSpec) -> None:
        self._layer, self._spec = layer, spec
        self._squares = torch.zeros(spec.intermediate_size)
        self._gram = torch.zeros(spec.query_size, spec.query_size)

    def look(self, group: str, inputs: Tensor, outputs: tuple[Tensor, ...]) -> None:
        rows = inputs.flatten(0, 1)
        if group == "down":
            self._squares += rows.square().sum(0)
        elif group == "o":
            self._gram.addmm_(rows.t(), rows)

    def channels(self) -> Tensor:
        return self._squares * self._layer["down"].square().sum(0)

    def groups(self) -> Tensor:
        """The energy of what each group of heads puts into the stream, by the moments of what `o` multiplies."""
        o = self._layer["o"]
        width = self._spec.query_size // self._spec.kv_head_count
        spans = [slice(start, start + width) for start in range(0, self._spec.query_size, width)]
        return torch.stack([((o[:, span] @ self._gram[span, span]) * o[:, span]).sum() for span in spans])


def _largest(values: Tensor, count: int) -> Tensor:
    """Indices of the largest, in order; of equal ones the first."""
    return torch.argsort(values, descending=True, stable=True)[:count].sort().values
