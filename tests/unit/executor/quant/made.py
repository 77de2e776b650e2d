"""Quantized matrices whose every number says where it is, and what the same numbers mean written out plainly."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pytest

from services.common.errors import QuireError, Reason
from services.executor.models.weights import QuantizedTensor
from services.executor.quant.bits import unpack_bits
from services.executor.quant.matrix import Fp8Matrix, GroupedMatrix
from services.executor.quant.parts import Part, StoredLayer

WIDTHS = (96, 160, 200)
"""Not all are whole groups of 64, and halves of none are."""


def grouped(
    rows: int, columns: int, bits: int, group_size: int, *, lowest_zero: int = 1, seed: int | None = None
) -> GroupedMatrix:
    """Position-coded: neighbours in any direction differ in code, zero point and scale. `seed` shuffles the groups.

    Scales are exact in fp16 and in bf16; zero points lie between `lowest_zero` and the highest code, and differ.
    """
    width = columns if group_size == -1 else group_size
    groups = -(-columns // width)
    row, column = np.ogrid[:rows, :columns]
    group = np.arange(groups)
    codes = (row * 5 + column * 3 + row * column) % (1 << bits)
    zeros = lowest_zero + (row * 3 + group * 7 + row * group) % ((1 << bits) - lowest_zero)
    scales = np.ldexp(1 + ((row * 7 + group * 11) % 128) / 128, -4 - (row + group) % 3)
    index = None
    if seed is not None:
        index = np.random.default_rng(seed).permutation(np.arange(columns) // width).astype(np.int32)
    return GroupedMatrix(bits, codes.astype(np.uint8), scales.astype(np.float32), zeros.astype(np.int16), width, index)


def symmetric(matrix: GroupedMatrix) -> GroupedMatrix:
    """The same with all zero points in the middle."""
    zeros = np.full_like(matrix.zeros, 1 << (matrix.bits - 1))
    return GroupedMatrix(matrix.bits, matrix.codes, matrix.scales, zeros, matrix.group_size, matrix.group_index)


def fp8(rows: int, columns: int, block: tuple[int, int]) -> Fp8Matrix:
    """Every code but NaN, position-coded, and scales that differ."""
    row, column = np.ogrid[:rows, :columns]
    codes = (row * 31 + column * 7) % 254
    codes += codes >= 127  # 127 and 255 are NaN
    down, across = np.ogrid[: -(-rows // block[0]), : -(-columns // block[1])]
    return Fp8Matrix(codes.astype(np.uint8), (0.5 + down + 0.25 * across).astype(np.float32), block)


def values(matrix: GroupedMatrix | Fp8Matrix) -> np.ndarray:
    """What the numbers mean, one by one in float64."""
    from services.executor.quant.matrix import fp8_values

    rows, columns = matrix.shape
    out = np.empty((rows, columns))
    for n in range(rows):
        for k in range(columns):
            if isinstance(matrix, Fp8Matrix):
                scale = matrix.scales[n // matrix.block[0], k // matrix.block[1]]
                out[n, k] = float(fp8_values()[matrix.codes[n, k]]) * float(scale)
            else:
                g = k // matrix.group_size if matrix.group_index is None else matrix.group_index[k]
                out[n, k] = (int(matrix.codes[n, k]) - int(matrix.zeros[n, g])) * float(matrix.scales[n, g])
    return out


def layer(shape: tuple[int, int], parts: Mapping[str, Part]) -> StoredLayer:
    return StoredLayer("layers.3.up", "model.layers.3.mlp.up_proj", shape, parts)


def read(tensor: QuantizedTensor) -> np.ndarray:
    """All values, read in pieces that do not fit words or blocks."""
    pieces = [
        tensor.read(start, min(start + 13, tensor.shape[0])).dequantize() for start in range(0, tensor.shape[0], 13)
    ]
    return np.concatenate(pieces)


def assert_same(tensor: QuantizedTensor, matrix: GroupedMatrix) -> None:
    """Codes, zero points, scales and groups are bit for bit those of the matrix, whole and in pieces."""
    found = tensor.read(0, tensor.shape[0])
    assert isinstance(found, GroupedMatrix)
    np.testing.assert_array_equal(found.codes, matrix.codes)
    np.testing.assert_array_equal(found.zeros, matrix.zeros)
    np.testing.assert_array_equal(found.scales, matrix.scales)
    np.testing.assert_array_equal(found.column_groups(), matrix.column_groups())
    np.testing.assert_array_equal(read(tensor), values(matrix))
    assert tensor.format == matrix.format
    if tensor.read_nibbles is not None:
        assert_same_nibbles(tensor, matrix)


def assert_same_nibbles(tensor: QuantizedTensor, matrix: GroupedMatrix) -> None:
    """Packed, they say the same, whole and in part."""
    assert tensor.read_nibbles is not None
    rows, columns = matrix.shape
    for first, last in ((0, rows), (rows // 3, rows - 1)):
        packed = tensor.read_nibbles(first, last)
        np.testing.assert_array_equal(unpack_bits(packed.words.T, 4, columns), matrix.codes[first:last])
        np.testing.assert_array_equal(packed.zeros, matrix.zeros[first:last])
        np.testing.assert_array_equal(packed.scales, matrix.scales[first:last])


def refused(action: Callable[[], object], message: str) -> None:
    with pytest.raises(QuireError, match=message) as error:
        action()
    assert error.value.reason is Reason.MODEL_LOAD_FAILED
