"""Matrices as compressed-tensors stores them, and the labels that tell so: the inverse of reading them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from services.executor.quant.bits import pack_bits
from services.executor.quant.matrix import Fp8Matrix, GroupedMatrix, Int16
from services.executor.quant.parts import Part

ScaleFormat = Literal["F16", "BF16", "F32"]

INT8_INPUTS: Mapping[str, Any] = MappingProxyType(
    {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
)
"""Inputs are rounded to int8 with a scale a token, found when they are there."""

FP8_INPUTS: Mapping[str, Any] = MappingProxyType(dict(INT8_INPUTS) | {"type": "float"})
"""The same with e4m3."""


def label(
    format_: Literal["pack-quantized", "int-quantized", "float-quantized"],
    weights: Mapping[str, Any],
    inputs: Mapping[str, Any] | None,
    ignored: Sequence[str] = ("lm_head",),
) -> dict[str, Any]:
    """The `quantization_config` of a checkpoint whose matrices, but the ignored ones, are all stored alike."""
    group = {
        "targets": ["Linear"],
        "weights": dict(weights),
        "input_activations": None if inputs is None else dict(inputs),
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": format_,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(ignored),
    }


def integer_weights(
    bits: int, group_size: int, *, is_symmetric: bool = True, is_ordered: bool = False
) -> dict[str, Any]:
    """The settings of `pack_words` and `pack_bytes`; a group size of -1 is one scale a row."""
    groups = {"strategy": "channel"} if group_size == -1 else {"strategy": "group", "group_size": group_size}
    order = {"actorder": "group"} if is_ordered else {}
    return {"num_bits": bits, "type": "int", "symmetric": is_symmetric, "dynamic": False, **groups, **order}


def fp8_weights(
    strategy: Literal["tensor", "channel", "block"], block: tuple[int, int] | None = None
) -> dict[str, Any]:
    """The settings of `pack_fp8`."""
    stated: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "strategy": strategy}
    return stated if block is None else stated | {"block_structure": list(block)}


def pack_words(matrix: GroupedMatrix, scale_format: ScaleFormat) -> dict[str, Part]:
    """As pack-quantized. ValueError for numbers that cannot be stored so."""
    parts = {
        "weight_packed": Part.of("I32", pack_bits(matrix.codes, matrix.bits).view(np.int32)),
        "weight_shape": Part.of("I64", np.array(matrix.shape)),
        **_common(matrix, scale_format),
    }
    if not matrix.format.is_symmetric:
        zeros = _checked(matrix, 0).astype(np.uint8)
        parts["weight_zero_point"] = Part.of("I32", pack_bits(zeros.T, matrix.bits).T.view(np.int32))
    return parts


def pack_bytes(matrix: GroupedMatrix, scale_format: ScaleFormat) -> dict[str, Part]:
    """As int-quantized. ValueError for numbers that cannot be stored so."""
    middle = 1 << (matrix.bits - 1)
    codes = (matrix.codes - np.uint8(middle)).view(np.int8)
    parts = {"weight": Part.of("I8", codes), **_common(matrix, scale_format)}
    if not matrix.format.is_symmetric:
        parts["weight_zero_point"] = Part.of("I8", _checked(matrix, middle))
    return parts


def pack_fp8(matrix: Fp8Matrix, scale_format: ScaleFormat = "F32", input_scale: float | None = None) -> dict[str, Part]:
    """As float-quantized; an input scale makes the activations static."""
    scales = matrix.scales.reshape(-1) if matrix.scales.size == 1 else matrix.scales
    parts = {"weight": Part.of("F8_E4M3", matrix.codes), "weight_scale": Part.of_floats(scale_format, scales)}
    if input_scale is not None:
        parts["input_scale"] = Part.of("F32", np.array([input_scale]))
    return parts


def _common(matrix: GroupedMatrix, scale_format: ScaleFormat) -> dict[str, Part]:
    parts = {"weight_scale": Part.of_floats(scale_format, matrix.scales)}
    if matrix.group_index is not None:
        parts["weight_g_idx"] = Part.of("I32", matrix.group_index)
    return parts


def _checked(matrix: GroupedMatrix, middle: int) -> Int16:
    """Zero points less the middle."""
    if matrix.zeros.min() < 0 or matrix.zeros.max() >= 1 << matrix.bits:
        raise ValueError(f"zero points {matrix.zeros.min()} to {matrix.zeros.max()} do not fit {matrix.bits} bits")
    return matrix.zeros - np.int16(middle)
