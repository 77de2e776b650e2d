"""4-bit matrices of files as codes, scales and offsets: the same numbers as dequantizing gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.quant_matmul import pack_int4
from services.executor.backends.cuda.int4_parts import Int4Parts, int4_parts, stacked
from services.executor.models.dequantize import to_float32
from services.executor.models.weights import QuantizedTensor, StoredTensor
from services.executor.quant.matrix import GroupedMatrix
from tests.fixtures.quantized import grouped

BYTES = {"Q4_0": (32, 18), "Q4_1": (32, 20), "Q4_K": (256, 144)}


def stored(format_: str, rows: int, columns: int) -> StoredTensor:
    """Any nibbles; scales that are finite."""
    values, size = BYTES[format_]
    draw = np.random.default_rng(len(format_) + rows)
    blocks = draw.integers(0, 256, (rows, columns // values, size), dtype=np.uint8)
    halves = 1 if format_ == "Q4_0" else 2
    blocks[..., : 2 * halves] = draw.uniform(0.01, 2, (*blocks.shape[:2], halves)).astype(np.float16).view(np.uint8)
    return StoredTensor("t", (rows, columns), format_, blocks.reshape(rows, -1))


def tensor(matrix: GroupedMatrix) -> QuantizedTensor:
    return QuantizedTensor("t", matrix.shape, matrix.format, lambda start, end: matrix.take_rows(slice(start, end)))


def meant(parts: Int4Parts | None) -> np.ndarray:
    assert parts is not None
    offsets = None if parts.offsets is None else torch.from_numpy(parts.offsets)
    order = None if parts.order is None else torch.from_numpy(parts.order)
    codes = torch.from_numpy(np.ascontiguousarray(parts.codes))
    return pack_int4(codes, torch.from_numpy(parts.scales), offsets, parts.group_size, order).dequantize().numpy()


@pytest.mark.parametrize("format_", BYTES)
def test_ggml_blocks(format_: str) -> None:
    one = stored(format_, 3, 512)
    np.testing.assert_allclose(meant(int4_parts(one)), to_float32(one), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("how", [{}, {"is_symmetric": True}, {"seed": 4}], ids=["zeros", "symmetric", "act-order"])
@pytest.mark.parametrize("size", [32, 64, -1])
def test_groups(how: dict[str, int], size: int) -> None:
    weights = np.random.default_rng(1).standard_normal((5, 128)).astype(np.float32)
    matrix = grouped(weights, 4, size, **how)
    parts = int4_parts(tensor(matrix))
    np.testing.assert_allclose(meant(parts), matrix.dequantize(), rtol=1e-5, atol=1e-5)
    assert parts is not None
    assert (parts.offsets is None) == ("is_symmetric" in how)


def test_what_no_kernel_reads_is_left() -> None:
    weights = np.random.default_rng(1).standard_normal((5, 96)).astype(np.float32)
    assert int4_parts(tensor(grouped(weights, 4, 48))) is None
    assert int4_parts(tensor(grouped(weights, 8, 32))) is None
    assert int4_parts(StoredTensor("t", (2, 2), "F32", np.zeros((2, 8), np.uint8))) is None


def test_matrices_lie_below_each_other_where_their_groups_are_the_same() -> None:
    weights = np.random.default_rng(1).standard_normal((5, 128)).astype(np.float32)
    symmetric, zeros = grouped(weights, 4, 32, is_symmetric=True), grouped(weights * 2, 4, 32)
    both = [int4_parts(tensor(matrix)) for matrix in (symmetric, zeros)]
    expected = np.concatenate([symmetric.dequantize(), zeros.dequantize()])
    np.testing.assert_allclose(meant(stacked([part for part in both if part])), expected, rtol=1e-5, atol=1e-5)
    others = (grouped(weights, 4, 64), grouped(weights, 4, 32, seed=4))
    for other in others:
        part = int4_parts(tensor(other))
        assert part is not None
        assert both[0] is not None
        assert stacked([both[0], part]) is None
