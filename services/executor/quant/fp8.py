"""FP8 checkpoints (`quant_method` fp8): e4m3 weights [N, K] with one scale, one a row, or one a block.

Scales are multiplied, also those named `weight_scale_inv`. Block scales are [ceil(N / rows), ceil(K / columns)] of
`weight_block_size`.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from services.executor.models.weights import Activations, QuantizedTensor, load_failed
from services.executor.quant.groups import MOST_COLUMNS, group_count
from services.executor.quant.matrix import Fp8Format, Fp8Matrix
from services.executor.quant.parts import FLOATS, Part, StoredLayer
from services.executor.quant.scheme import Label, choice

PARTS = frozenset(("weight", "weight_scale", "weight_scale_inv", "input_scale"))


class Fp8Scheme:
    """All matrices of an FP8 checkpoint."""

    def __init__(self, label: Label) -> None:
        self._is_static = choice(label, "activation_scheme", ("dynamic", "static"), "dynamic") == "static"
        self._block = block_size(label.get("weight_block_size"))

    def open(self, layer: StoredLayer) -> QuantizedTensor:
        layer.check_parts(PARTS)
        name = "weight_scale_inv" if "weight_scale_inv" in layer.parts else "weight_scale"
        if self._block is not None:
            activations = Activations("fp8", "group")
            return open_fp8(layer, name, self._block, activations)
        rows, columns = layer.shape
        per_row = layer.parts.get(name) is not None and layer.parts[name].shape in ((rows,), (rows, 1)) and rows > 1
        scale = fixed_scale(layer) if self._is_static else None
        activations = Activations("fp8", "tensor" if self._is_static else "token", scale)
        return open_fp8(layer, name, (1 if per_row else rows, columns), activations)


def open_fp8(
    layer: StoredLayer, scale_name: str, block: tuple[int, int], activations: Activations | None
) -> QuantizedTensor:
    """A matrix whose scales hold for blocks of that many rows and columns."""
    rows, columns = layer.shape
    codes = layer.part("weight", ("F8_E4M3",), layer.shape).array()
    down, across = group_count(rows, block[0]), group_count(columns, block[1])
    shapes = [(down, across)] + ([(down,)] if across == 1 else []) + ([()] if down == across == 1 else [])
    scales = layer.part(scale_name, FLOATS, *shapes).floats().reshape(down, across)
    matrix = Fp8Matrix(codes, scales, block)

    def read(start: int, stop: int) -> Fp8Matrix:
        return matrix.take_rows(slice(start, stop))

    return QuantizedTensor(layer.name, layer.shape, Fp8Format(block), read, activations)


def fixed_scale(layer: StoredLayer) -> float:
    """The scale of a static activation scheme."""
    scale = float(layer.part("input_scale", FLOATS, (), (1,)).floats().reshape(()))
    if not (np.isfinite(scale) and scale > 0):
        raise layer.refused(f"input_scale is {scale}")
    return scale


def block_size(stated: Any) -> tuple[int, int] | None:
    """Rows and columns of a block as a label states them."""
    if stated is None:
        return None
    if not (isinstance(stated, list) and len(stated) == 2 and all(map(_is_width, stated))):
        raise load_failed(f"quantization_config: blocks of {stated!r}, expected rows and columns")
    return stated[0], stated[1]


def _is_width(number: Any) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and 1 <= number <= MOST_COLUMNS


def label(block: tuple[int, int] | None, activation_scheme: Literal["dynamic", "static"] = "dynamic") -> dict[str, Any]:
    """The `quantization_config` of matrices that `pack` wrote; without blocks, of one scale a matrix."""
    stated: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": activation_scheme}
    return stated if block is None else stated | {"weight_block_size": list(block)}


def pack(matrix: Fp8Matrix, block: tuple[int, int] | None, input_scale: float | None = None) -> dict[str, Part]:
    """The inverse of reading, under a label with this block. ValueError where the matrix has others."""
    if (block is None and matrix.scales.size > 1) or block not in (None, matrix.block):
        raise ValueError(f"blocks of {matrix.block}, where {block} are stated")
    scales = Part.of_floats("F32", matrix.scales.reshape(()) if block is None else matrix.scales)
    parts = {
        "weight": Part.of("F8_E4M3", matrix.codes),
        "weight_scale" if block is None else "weight_scale_inv": scales,
    }
    if input_scale is not None:
        parts["input_scale"] = Part.of("F32", np.full((), input_scale))
    return parts
