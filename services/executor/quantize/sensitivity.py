"""What rounding each group of matrices would cost the model, in nats per token.

Near the trained weights the loss is quadratic in their changes, with the Fisher information as its curvature (Dong et
al. 2019, HAWQ). Of one matrix, that is close to the product of the second moments of its inputs and those of the
gradients at its outputs (Martens & Grosse 2015, K-FAC). Errors of weights are taken as GPTQ leaves them: an error of
column i costs its square over U[i, i] ** 2, with U the factor of the inputs' inverse moments (Frantar et al. 2022).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from services.executor.models.weights import Checkpoint
from services.executor.quantize.differentiable import Angles, logits, run_layer
from services.executor.quantize.finite import check_computed, read_tensor
from services.executor.quantize.gptq import find_compensation
from services.executor.quantize.grid import Grid, fit_closest
from services.executor.quantize.layer import GROUPS, Layer, read_layer
from services.executor.quantize.stream import embed

SAMPLES = 16
"""Of the calibration text, so many are measured at most: inputs of all layers are kept for them."""

_ROWS = 256  # of a matrix, evenly spread, stand for all
_SEED = 0

Losses = dict[str, dict[Grid, float]]
"""By the group of matrices, named as `layers.3.qkv`, and how it is rounded."""


def measure_losses(
    checkpoint: Checkpoint,
    tokens: NDArray[np.int32],
    grids: Sequence[Grid],
    *,
    by_importance: bool,
    done: Callable[[int], object],
) -> Losses:
    """For tokens [S, T]; `by_importance` is act-order. Calls `done(1)` for each of twice as many layers as there are.

    Gradients are those of the loss on tokens that the model itself draws, whose moments are the Fisher information.
    Raises MODEL_LOAD_FAILED and NOT_FINITE.
    """
    spec, angles = checkpoint.spec, Angles.of(checkpoint.spec, tokens.shape[1])
    entering = [embed(checkpoint, tokens)]
    with torch.no_grad():
        for index in range(spec.layer_count):
            layer = read_layer(checkpoint, index)
            entering.append(torch.cat([run_layer(layer, spec, angles, x) for x in torch.split(entering[-1], 1)]))
            check_computed(f"what leaves layer {index}", entering[-1])
            done(1)
    slopes = _last_slopes(checkpoint, entering.pop())
    losses: Losses = {}
    for index in reversed(range(spec.layer_count)):
        layer = read_layer(checkpoint, index)
        seen = {group: _Moments(layer, group) for group in GROUPS}
        slopes = torch.cat(
            [_back(layer, checkpoint, angles, x, slope, seen) for x, slope in _pairs(entering.pop(), slopes)]
        )
        with torch.no_grad():
            for group, moments in seen.items():
                own = moments.losses(layer, grids, tokens.size, by_importance)
                check_computed(f"what rounding layers.{index}.{group} would cost", torch.tensor(list(own.values())))
                losses[f"layers.{index}.{group}"] = own
        done(1)
    return losses


class _Moments:
    """Of one group of matrices: second moments of its inputs, and of the gradient at each output."""

    def __init__(self, layer: Layer, group: str) -> None:
        width = layer[GROUPS[group][0]].shape[1]
        self._names = GROUPS[group]
        self._gram = torch.zeros(width, width)
        self._energies = [torch.zeros(len(layer[name])) for name in self._names]

    def add(self, inputs: Tensor, slopes: Sequence[Tensor]) -> None:
        """Inputs [1, T, K], and for each matrix the gradient at its outputs [1, T, N]."""
        x = inputs.flatten(0, 1)
        self._gram.addmm_(x.t(), x)
        for energy, slope in zip(self._energies, slopes, strict=True):
            energy += slope.square().sum((0, 1))

    def losses(self, layer: Layer, grids: Sequence[Grid], count: int, by_importance: bool) -> dict[Grid, float]:
        """Half the quadratic form, over `count` tokens."""
        compensation = find_compensation(self._gram / count, by_importance=by_importance)
        costs = compensation.factor.diagonal() ** -2
        total = dict.fromkeys(grids, 0.0)
        for name, energy in zip(self._names, self._energies, strict=True):
            rows = torch.linspace(0, len(energy) - 1, min(len(energy), _ROWS)).round().long()
            weights = layer[name][rows][:, compensation.order]
            share = float(energy.sum() / energy[rows].sum().clamp(min=torch.finfo(torch.float32).tiny))
            for grid in grids:
                errors = _errors(weights, costs, grid)
                total[grid] += 0.5 * share * float(errors @ energy[rows]) / count
        return total


def _errors(weights: Tensor, costs: Tensor, grid: Grid) -> Tensor:
    """What rounding a matrix [N, K] costs at each output [N], by the costs of its columns [K]."""
    width = grid.width(weights.shape[1])
    groups = weights.view(len(weights), -1, width)
    own = costs.view(-1, width)
    return (fit_closest(groups, grid, own).rounded(groups, grid) - groups).square_().mul_(own).sum((1, 2))


def _last_slopes(checkpoint: Checkpoint, hidden: Tensor) -> Tensor:
    """The gradient of the loss at what leaves the last layer [S, T, H]; the sum over all tokens is meant."""
    spec = checkpoint.spec
    final_norm = read_tensor(checkpoint, "final_norm")
    head = read_tensor(checkpoint, "embedding" if spec.tied_embeddings else "head")
    random = torch.Generator().manual_seed(_SEED)
    slopes = torch.empty_like(hidden)
    for x, slope in zip(
        torch.split(hidden.flatten(0, 1), 512), torch.split(slopes.view(-1, spec.hidden_size), 512), strict=True
    ):
        x = x.clone().requires_grad_()
        scores = logits(x, final_norm, head, spec)
        check_computed("the model's logits", scores.detach())
        drawn = torch.multinomial(scores.detach().softmax(-1), 1, generator=random).squeeze(1)
        slope[:] = torch.autograd.grad(F.cross_entropy(scores, drawn, reduction="sum"), x)[0]
    return slopes


def _back(
    layer: Layer, checkpoint: Checkpoint, angles: Angles, x: Tensor, slope: Tensor, seen: Mapping[str, _Moments]
) -> Tensor:
    """The gradient at what enters a layer, from that at what leaves it; both [1, T, H]."""
    x = x.clone().requires_grad_()
    met: dict[str, tuple[Tensor, tuple[Tensor, ...]]] = {}
    out = run_layer(
        layer, checkpoint.spec, angles, x, lambda group, inputs, outputs: met.update({group: (inputs, outputs)})
    )
    outputs = [output for _, found in met.values() for output in found]
    first, *rest = torch.autograd.grad(out, [x, *outputs], slope)
    slopes = iter(rest)
    for group, (inputs, found) in met.items():
        seen[group].add(inputs.detach(), [next(slopes) for _ in found])
    return first


def _pairs(x: Tensor, slopes: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(torch.split(x, 1), torch.split(slopes, 1), strict=True)
