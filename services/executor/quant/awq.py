"""AWQ checkpoints of 4 bits in AutoAWQ's layout for matrix products (`version` gemm).

`qweight` int32 [K, N / 8] and `qzeros` int32 [G, N / 8] pack eight outputs a word, in the order 0, 2, 4, 6, 1, 3, 5, 7
from the low bits up; `scales` is [G, N].
"""

from __future__ import annotations

from typing import Any

import numpy as np

from services.executor.models.weights import QuantizedTensor
from services.executor.quant.bits import UInt32, pack_bits
from services.executor.quant.groups import group_count, group_width
from services.executor.quant.matrix import Float32, GroupedFormat, GroupedMatrix, Int16, UInt8
from services.executor.quant.nibbles import COLUMNS, NibbleMatrix, turn_eights
from services.executor.quant.parts import FLOATS, Part, StoredLayer
from services.executor.quant.scheme import Label, choice, integer

BITS = 4
PARTS = frozenset(("qweight", "qzeros", "scales"))
_ORDER = np.array((0, 2, 4, 6, 1, 3, 5, 7))
"""The output that each nibble of a word holds, from the low bits up."""


class AwqScheme:
    """All matrices of an AWQ checkpoint."""

    def __init__(self, label: Label) -> None:
        integer(label, "bits", "w_bit", choices=(BITS,))
        choice(label, "version", ("gemm",), "gemm")
        self._group_size = integer(label, "group_size", "q_group_size")

    def open(self, layer: StoredLayer) -> QuantizedTensor:
        layer.check_parts(PARTS)
        rows, columns = layer.shape
        width = group_width(layer, self._group_size)
        groups = group_count(columns, width)
        packed = -(-rows // 8)
        words = layer.part("qweight", ("I32",), (columns, packed)).array().view(np.uint32)
        zero_words = layer.part("qzeros", ("I32",), (groups, packed)).array().view(np.uint32)
        scales = layer.part("scales", FLOATS, (groups, rows))

        def numbers(start: int, stop: int) -> tuple[Float32, Int16]:
            own = np.ascontiguousarray(scales.floats(slice(None), slice(start, stop)).T)
            return own, _unpack(zero_words, start, stop).astype(np.int16)

        def read(start: int, stop: int) -> GroupedMatrix:
            return GroupedMatrix(BITS, _unpack(words, start, stop), *numbers(start, stop), width)

        def read_nibbles(start: int, stop: int) -> NibbleMatrix:
            return NibbleMatrix(_turn(words, start, stop), *numbers(start, stop))

        is_symmetric = bool((_unpack(zero_words, 0, rows) == 8).all())
        return QuantizedTensor(
            layer.name,
            layer.shape,
            GroupedFormat(BITS, width, is_symmetric),
            read,
            read_nibbles=read_nibbles if columns % COLUMNS == 0 else None,
        )


def label(group_size: int) -> dict[str, Any]:
    """The `quantization_config` of matrices that `pack` wrote."""
    return {"quant_method": "awq", "bits": BITS, "group_size": group_size, "version": "gemm", "zero_point": True}


def pack(matrix: GroupedMatrix) -> dict[str, Part]:
    """The inverse of reading. ValueError for other than 4 bits, act-order, and scales that are not exact in fp16."""
    if matrix.bits != BITS or matrix.group_index is not None:
        raise ValueError(f"AWQ stores 4 bits in neighbouring groups, not {matrix.format}")
    if matrix.zeros.min() < 0 or matrix.zeros.max() > 15:
        raise ValueError(f"zero points {matrix.zeros.min()} to {matrix.zeros.max()} do not fit 4 bits")
    return {
        "qweight": Part.of("I32", _pack(matrix.codes.T).view(np.int32)),
        "qzeros": Part.of("I32", _pack(matrix.zeros.T.astype(np.uint8)).view(np.int32)),
        "scales": Part.of_floats("F16", np.ascontiguousarray(matrix.scales.T)),
    }


def _unpack(words: UInt32, start: int, stop: int) -> UInt8:
    """Outputs [stop - start, n] of words [n, N / 8]."""
    first, last = start // 8, -(-stop // 8)
    data = np.ascontiguousarray(words[:, first:last], "<u4").view(np.uint8)
    columns = np.ascontiguousarray(data.T).reshape(last - first, 4, len(words))  # of bytes
    out = np.empty((last - first, 8, len(words)), np.uint8)
    for nibble, output in enumerate(_ORDER):
        np.right_shift(columns[:, nibble // 2], np.uint8(nibble % 2 * 4), out=out[:, output])
    out &= np.uint8(15)
    return out.reshape(-1, len(words))[start - first * 8 : stop - first * 8]


def _turn(words: UInt32, start: int, stop: int) -> UInt32:
    """Outputs as words of eight inputs [n / 8, stop - start] of words [n, N / 8]."""
    first, last = start // 8, -(-stop // 8)
    turned = turn_eights(words[:, first:last], _ORDER.tolist())
    return turned[:, start - first * 8 : stop - first * 8]


def _pack(values: UInt8) -> UInt32:
    """[n, N] to words [n, ceil(N / 8)]; outputs beyond the last are 0."""
    padded = np.zeros((len(values), -(-values.shape[1] // 8) * 8), np.uint8)
    padded[:, : values.shape[1]] = values
    return pack_bits(padded.reshape(len(values), -1, 8)[..., _ORDER].reshape(len(values), -1), BITS)
