"""The methods, each a way to take one layer from plain weights to quantized ones.

A method gets the layer's weights and the calibration text as it enters the layer. It leaves the layer holding what the
files will hold, and the text where it leaves that layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from services.executor.models.spec import ModelSpec
from services.executor.quant.matrix import QuantizedMatrix
from services.executor.quantize import awq, fp8, gptq, smoothquant
from services.executor.quantize.choice import MethodName
from services.executor.quantize.finite import check_computed
from services.executor.quantize.fold import fold, shared
from services.executor.quantize.grid import Grid, round_to_nearest
from services.executor.quantize.layer import GROUPS, Layer
from services.executor.quantize.moments import Peaks, SecondMoments
from services.executor.quantize.recipe import Recipe
from services.executor.quantize.stream import CalibrationStream

Matrices = dict[str, QuantizedMatrix]
"""By their names within the layer."""


class Method(Protocol):
    """Quantizes layer after layer."""

    def quantize(self, layer: Layer, grids: Mapping[str, Grid], stream: CalibrationStream | None) -> Matrices:
        """Every matrix, by grids named as in the layer. Replaces its tensors by what they are from now on.

        Raises NOT_FINITE.
        """
        ...


class RoundToNearest:
    """Each weight alone. Needs no text."""

    def quantize(self, layer: Layer, grids: Mapping[str, Grid], stream: CalibrationStream | None) -> Matrices:
        return _replace(layer, lambda name: round_to_nearest(layer[name], grids[name]))


class Fp8:
    """e4m3. Needs no text."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe

    def quantize(self, layer: Layer, grids: Mapping[str, Grid], stream: CalibrationStream | None) -> Matrices:
        def rounded(name: str) -> QuantizedMatrix:
            rows, columns = layer[name].shape
            return fp8.quantize(layer[name], self._recipe.fp8_block(rows, columns), torch.bfloat16)

        return _replace(layer, rounded)


RoundMatrix = Callable[[Tensor, gptq.Compensation, Grid | None], QuantizedMatrix]


class Gptq:
    """Each group of matrices after those before it, with the inputs that these now give."""

    def __init__(self, round_matrix: RoundMatrix, *, by_importance: bool) -> None:
        self._round_matrix, self._by_importance = round_matrix, by_importance

    def quantize(self, layer: Layer, grids: Mapping[str, Grid], stream: CalibrationStream | None) -> Matrices:
        assert stream is not None
        found: Matrices = {}
        for group, names in GROUPS.items():
            moments = SecondMoments(layer[names[0]].shape[1])
            stream.visit(group, layer, moments.add)
            compensation = gptq.find_compensation(moments.gram, by_importance=self._by_importance)
            for name in names:
                found[name] = _checked(name, self._round_matrix(layer[name], compensation, grids.get(name)))
                layer[name] = _dequantized(found[name])
        stream.finish(layer)
        return found


class Awq:
    """Factors for all groups of matrices, then clipping, then rounding."""

    _UNCLIPPED = ("q", "k")  # their products meet each other before anything evens errors out

    def __init__(self, spec: ModelSpec, norm_dtype: torch.dtype) -> None:
        self._spec, self._norm_dtype = spec, norm_dtype

    def quantize(self, layer: Layer, grids: Mapping[str, Grid], stream: CalibrationStream | None) -> Matrices:
        assert stream is not None
        moments = {group: SecondMoments(layer[names[0]].shape[1]) for group, names in GROUPS.items()}
        stream.observe(layer, {group: seen.add for group, seen in moments.items()})
        for group, names in GROUPS.items():
            gram = moments[group].gram
            magnitudes = shared(moments[group].mean_magnitude, group, self._spec)
            factors = awq.find_factors([(layer[name], grids[name]) for name in names], gram, magnitudes)
            taken = fold(layer, group, factors, self._spec, self._norm_dtype)
            gram /= taken[:, None] * taken
        for group, names in GROUPS.items():
            for name in names:
                if name not in self._UNCLIPPED:
                    layer[name] = awq.clip(layer[name], moments[group].gram, grids[name])
        found = _replace(layer, lambda name: round_to_nearest(layer[name], grids[name]))
        stream.pass_through(layer)
        return found


class SmoothQuant:
    """Factors for what norms feed, then rounding."""

    _SMOOTHED = ("qkv", "gate_up")

    def __init__(self, spec: ModelSpec, norm_dtype: torch.dtype) -> None:
        self._spec, self._norm_dtype = spec, norm_dtype

    def quantize(self, layer: Layer, grids: Mapping[str, Grid], stream: CalibrationStream | None) -> Matrices:
        assert stream is not None
        peaks = {group: Peaks(self._spec.hidden_size) for group in self._SMOOTHED}
        stream.observe(layer, {group: seen.add for group, seen in peaks.items()})
        for group, seen in peaks.items():
            factors = smoothquant.find_factors([layer[name] for name in GROUPS[group]], seen.largest)
            fold(layer, group, factors, self._spec, self._norm_dtype)
        found = _replace(layer, lambda name: round_to_nearest(layer[name], grids[name]))
        stream.pass_through(layer)
        return found


def find_method(recipe: Recipe, spec: ModelSpec, norm_dtype: torch.dtype) -> Method:
    """The method of a recipe; norms are stored as `norm_dtype`."""
    methods: Mapping[MethodName, Callable[[], Method]] = MappingProxyType(
        {
            "rtn": RoundToNearest,
            "gptq": lambda: Gptq(_compensated_integers, by_importance=recipe.act_order),
            "awq": lambda: Awq(spec, norm_dtype),
            "smoothquant": lambda: SmoothQuant(spec, norm_dtype),
            "fp8": lambda: Fp8(recipe),
            # Scales belong to rows or to fixed blocks, so the order of rounding costs no index.
            "gptq-fp8": lambda: Gptq(_compensated_fp8(recipe), by_importance=True),
        }
    )
    return methods[recipe.method]()


def _compensated_integers(weight: Tensor, compensation: gptq.Compensation, grid: Grid | None) -> QuantizedMatrix:
    assert grid is not None
    return gptq.quantize(weight, compensation, grid)


def _compensated_fp8(recipe: Recipe) -> RoundMatrix:
    def rounded(weight: Tensor, compensation: gptq.Compensation, grid: Grid | None) -> QuantizedMatrix:
        rows, columns = weight.shape
        return fp8.quantize_compensated(weight, compensation, recipe.fp8_block(rows, columns), torch.bfloat16)

    return rounded


def _replace(layer: Layer, rounded: Callable[[str], QuantizedMatrix]) -> Matrices:
    """Rounds every matrix of the layer and puts what it is then in its place."""
    found = {}
    for names in GROUPS.values():
        for name in names:
            found[name] = _checked(name, rounded(name))
            layer[name] = _dequantized(found[name])
    return found


def _checked(name: str, matrix: QuantizedMatrix) -> QuantizedMatrix:
    """The matrix, or NOT_FINITE where the format has no scales for weights so large."""
    check_computed(f"scales of {name}", torch.from_numpy(matrix.scales))
    return matrix


def _dequantized(matrix: QuantizedMatrix) -> Tensor:
    return torch.from_numpy(matrix.dequantize())
