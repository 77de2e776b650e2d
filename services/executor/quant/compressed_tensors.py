"""Checkpoints of the compressed-tensors library (`quant_method` compressed-tensors): integers of up to 8 bits, and FP8.

- pack-quantized: `weight_packed` int32 [N, words of K] without gaps, `weight_scale` [N, G], `weight_zero_point` int32
  [words of N, G] where asymmetric, `weight_g_idx` [K] with act-order, `weight_shape` [2]
- int-quantized and naive-quantized: `weight` int8 [N, K], `weight_scale`, `weight_zero_point` int8
- float-quantized and naive-quantized: `weight` e4m3 [N, K], `weight_scale`

Integers are signed; packed ones have 2 ** (bits - 1) added, which is just how neutral forms hold them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from services.executor.models.weights import Activations, QuantizedTensor, load_failed
from services.executor.quant import nibbles
from services.executor.quant.bits import UInt32, unpack_bits, unpack_window, word_count
from services.executor.quant.fp8 import block_size, fixed_scale, open_fp8
from services.executor.quant.groups import group_count, group_index, group_width
from services.executor.quant.matrix import Float32, GroupedFormat, GroupedMatrix, Int16, UInt8
from services.executor.quant.nibbles import NibbleMatrix
from services.executor.quant.parts import FLOATS, Part, StoredLayer
from services.executor.quant.scheme import Label, choice, flag, integer, pattern

FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision")
_COMMON = ("weight_scale", "weight_zero_point", "weight_g_idx", "input_scale", "input_zero_point")
PACKED_PARTS = frozenset((*_COMMON, "weight_packed", "weight_shape"))
PLAIN_PARTS = frozenset((*_COMMON, "weight"))

Target = str | re.Pattern[str]

_ORDERS = ("false", "true", "weight", "static", "group", "dynamic")
"""The columns' order for rounding; with `weight` and `static`, groups are neighbours all the same."""

_KINDS: Mapping[str, Literal["int8", "fp8"]] = {"int": "int8", "float": "fp8"}


@dataclass(frozen=True, slots=True)
class WeightSettings:
    """How the weights of a group of layers are quantized."""

    kind: str  # int or float
    bits: int
    strategy: str
    group_size: int  # -1 but for groups
    block: tuple[int, int] | None
    is_symmetric: bool
    is_ordered: bool

    @classmethod
    def of(cls, label: Label) -> WeightSettings:
        kind = choice(label, "type", ("int", "float"), "int")
        bits = integer(label, "num_bits", choices=(2, 3, 4, 8) if kind == "int" else (8,))
        size = label.get("group_size")
        default = "tensor" if size is None else "group" if size != -1 else "channel"
        strategy = choice(label, "strategy", ("tensor", "channel", "group", "block"), default)
        block = block_size(label.get("block_structure"))
        if (strategy == "block") != (block is not None) or (block is not None and kind == "int"):
            raise load_failed(f"quantization_config: strategy {strategy} with block_structure {block} for {kind}")
        return cls(
            kind=kind,
            bits=bits,
            strategy=strategy,
            group_size=integer(label, "group_size") if strategy == "group" else -1,
            block=block,
            is_symmetric=flag(label, "symmetric") is not False,
            is_ordered=choice(label, "actorder", _ORDERS, "false") in ("true", "group", "dynamic"),
        )


@dataclass(frozen=True, slots=True)
class _Group:
    """Some layers and how they are quantized."""

    targets: tuple[Target, ...]
    weights: WeightSettings
    inputs: Label | None

    @classmethod
    def of(cls, label: Label) -> _Group:
        weights, inputs = label.get("weights"), label.get("input_activations")
        if not isinstance(weights, dict) or label.get("targets") is None or not isinstance(inputs, dict | None):
            raise load_failed("quantization_config: config_groups: expected targets, weights and input_activations")
        if label.get("output_activations"):
            raise load_failed("quantization_config: output_activations are not supported")
        return cls(_targets(label, "targets"), WeightSettings.of(weights), inputs)


class CompressedTensorsScheme:
    """All matrices of a checkpoint; each belongs to the group whose targets name it most closely."""

    def __init__(self, label: Label) -> None:
        choice(label, "format", FORMATS, "naive-quantized")
        sparse = label.get("sparsity_config")
        kind = sparse.get("format", "dense") if isinstance(sparse, dict) else sparse or "dense"
        if kind != "dense":
            raise load_failed(f"quantization_config: sparse format {kind} is not supported")
        if label.get("transform_config"):
            raise load_failed("quantization_config: transform_config: transformed weights are not supported")
        groups = label.get("config_groups")
        if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
            raise load_failed(f"quantization_config: config_groups is {groups!r}, expected groups of layers")
        for group in groups.values():
            choice(group, "format", FORMATS, "mixed-precision")
        self._groups = [_Group.of(group) for group in groups.values()]
        self._ignored = _targets(label, "ignore")

    def open(self, layer: StoredLayer) -> QuantizedTensor:
        group = self._group(layer)
        weights = group.weights
        is_packed = "weight_packed" in layer.parts
        layer.check_parts(PACKED_PARTS if is_packed else PLAIN_PARTS)
        activations = None if group.inputs is None else _activations(layer, group.inputs)
        if weights.kind == "float":
            return open_fp8(layer, "weight_scale", _block(layer, weights), activations)
        return _open_packed(layer, weights, activations) if is_packed else _open_bytes(layer, weights, activations)

    def _group(self, layer: StoredLayer) -> _Group:
        """By the exact name, a pattern, or the class Linear, which all matrices here are."""
        if any(_distance(target, layer.module) < _CLASS for target in self._ignored):
            raise layer.refused("is stored quantized, but the label tells to ignore it")
        near = [
            min((_distance(target, layer.module) for target in group.targets), default=_NOT) for group in self._groups
        ]
        if min(near, default=_NOT) == _NOT:
            raise layer.refused("is stored quantized, but no group of the label names it")
        return self._groups[near.index(min(near))]


_NAME, _PATTERN, _CLASS, _NOT = range(4)


def _targets(label: Label, key: str) -> tuple[Target, ...]:
    """Names of modules or classes, and patterns, which begin with `re:`."""
    names = label.get(key)
    if not isinstance(names, list | None):
        raise load_failed(f"quantization_config: {key} is {names!r}, expected a list")
    return tuple(pattern(key, name, "re:") if name.startswith("re:") else name for name in map(str, names or ()))


def _distance(target: Target, module: str) -> int:
    """How closely a target names a module."""
    if isinstance(target, re.Pattern):
        return _PATTERN if target.match(module) else _NOT
    return _NAME if target == module else _CLASS if target == "Linear" else _NOT


def _activations(layer: StoredLayer, label: Label) -> Activations:
    kind = _KINDS[choice(label, "type", ("int", "float"), "int")]
    integer(label, "num_bits", choices=(8,))
    per: Literal["token", "tensor", "group"] = choice(label, "strategy", ("token", "tensor", "group"), "tensor")
    is_symmetric = flag(label, "symmetric") is not False
    scale = None if label.get("dynamic") else fixed_scale(layer)
    return Activations(kind, per, scale, is_symmetric)


def _block(layer: StoredLayer, weights: WeightSettings) -> tuple[int, int]:
    rows, columns = layer.shape
    match weights.strategy:
        case "tensor":
            return rows, columns
        case "channel":
            return 1, columns
        case "group":
            return 1, group_width(layer, weights.group_size)
    assert weights.block is not None
    return weights.block


def _scales(layer: StoredLayer, weights: WeightSettings, groups: int) -> Part:
    rows = layer.shape[0]
    if weights.strategy == "tensor":
        return layer.part("weight_scale", FLOATS, (), (1,), (1, 1))
    return layer.part("weight_scale", FLOATS, (rows, groups), *([(rows,)] if groups == 1 else []))


def _open_packed(layer: StoredLayer, weights: WeightSettings, activations: Activations | None) -> QuantizedTensor:
    rows, columns = layer.shape
    words = layer.part("weight_packed", ("I32",), (rows, word_count(columns, weights.bits))).array().view(np.uint32)
    shape = layer.part("weight_shape", ("I64", "I32"), (2,)).array()
    if tuple(shape) != layer.shape:
        raise layer.refused(f"weight_shape is {shape.tolist()}")

    def codes(start: int, stop: int) -> UInt8:
        return unpack_bits(words[start:stop], weights.bits, columns)

    can_stay = weights.bits == nibbles.BITS and columns % nibbles.COLUMNS == 0
    return _grouped(layer, weights, activations, codes, words if can_stay else None)


def _open_bytes(layer: StoredLayer, weights: WeightSettings, activations: Activations | None) -> QuantizedTensor:
    stored = layer.part("weight", ("I8",), layer.shape).array()
    middle = 1 << (weights.bits - 1)

    def codes(start: int, stop: int) -> UInt8:
        values = stored[start:stop]
        if weights.bits < 8 and (values.min() < -middle or values.max() >= middle):
            raise layer.refused(f"weight holds {values.min()} to {values.max()}, which are no {weights.bits} bits")
        return values.view(np.uint8) + np.uint8(middle)

    return _grouped(layer, weights, activations, codes)


def _grouped(
    layer: StoredLayer,
    weights: WeightSettings,
    activations: Activations | None,
    codes: Callable[[int, int], UInt8],
    nibble_words: UInt32 | None = None,
) -> QuantizedTensor:
    """What packed and plain integers share: scales, zero points and groups.

    `nibble_words` [N, K / 8] are those of codes that can stay packed.
    """
    rows, columns = layer.shape
    width = group_width(layer, weights.group_size)
    groups = group_count(columns, width)
    scales = _scales(layer, weights, groups).floats().reshape(-1, groups)
    zeros = _zeros(layer, weights, groups)
    stated = None
    if "weight_g_idx" in layer.parts:
        stated = layer.part("weight_g_idx", ("I32", "I64"), (columns,)).array()
    index = None
    if weights.is_ordered or (stated is not None and (stated >= 0).any()):  # -1: never filled
        index = group_index(layer, "weight_g_idx", width, is_needed=weights.is_ordered)

    def numbers(start: int, stop: int) -> tuple[Float32, Int16]:
        shape = (rows, groups)
        return np.broadcast_to(scales, shape)[start:stop], np.broadcast_to(zeros, shape)[start:stop]

    def read(start: int, stop: int) -> GroupedMatrix:
        return GroupedMatrix(weights.bits, codes(start, stop), *numbers(start, stop), width, index)

    def read_nibbles(start: int, stop: int) -> NibbleMatrix:
        assert nibble_words is not None
        return NibbleMatrix(nibble_words[start:stop].T, *numbers(start, stop))

    is_symmetric = bool((zeros == 1 << (weights.bits - 1)).all())
    format_ = GroupedFormat(weights.bits, width, is_symmetric, index is not None)
    packed = None if nibble_words is None else read_nibbles
    return QuantizedTensor(layer.name, layer.shape, format_, read, activations, packed)


def _zeros(layer: StoredLayer, weights: WeightSettings, groups: int) -> Int16:
    """[N, G], or [1, 1] for all."""
    rows, middle = layer.shape[0], np.int16(1 << (weights.bits - 1))
    if "weight_zero_point" not in layer.parts:
        if not weights.is_symmetric:
            raise layer.refused("weight_zero_point is missing, but the label says asymmetric")
        return np.full((1, 1), middle)
    packed = (word_count(rows, weights.bits), groups)
    single = [(), (1,), (1, 1)] if weights.strategy == "tensor" else [(rows, groups)]
    if layer.parts["weight_zero_point"].format == "I32":
        words = layer.part("weight_zero_point", ("I32",), packed).array().view(np.uint32)
        return np.ascontiguousarray(unpack_window(words.T, weights.bits, 0, rows).T.astype(np.int16))
    zeros = layer.part("weight_zero_point", ("I8",), *single).array().reshape(-1, groups)
    return zeros.astype(np.int16) + middle
