"""Neutral forms: what numbers mean, and splits over workers."""

import numpy as np
import pytest
import torch

from services.executor.quant.matrix import Fp8Matrix, GroupedMatrix, fp8_codes, fp8_values
from tests.unit.executor.quant.made import WIDTHS, fp8, grouped, symmetric, values

BLOCKS = ((24, 200), (1, 200), (1, 64), (8, 64), (128, 128))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("group_size", [64, -1])
@pytest.mark.parametrize("seed", [None, 1])
def test_groups_mean_what_they_say(bits: int, width: int, group_size: int, seed: int | None) -> None:
    matrix = grouped(6, width, bits, group_size, seed=seed)
    np.testing.assert_array_equal(matrix.dequantize(), values(matrix))
    assert matrix.format.is_symmetric is False
    assert symmetric(matrix).format.is_symmetric is True


@pytest.mark.parametrize("block", BLOCKS)
def test_fp8_blocks_mean_what_they_say(block: tuple[int, int]) -> None:
    matrix = fp8(24, 200, block)
    np.testing.assert_array_equal(matrix.dequantize(), values(matrix))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("group_size", [64, -1])
@pytest.mark.parametrize("seed", [None, 1], ids=["neighbours", "act-order"])
@pytest.mark.parametrize("workers", [1, 2])
def test_splits_over_workers_are_the_whole(width: int, group_size: int, seed: int | None, workers: int) -> None:
    """Q2, Q4: by columns and by rows, groups cut or not, act-order or not."""
    matrix = grouped(10, width, 4, group_size, seed=seed)
    expected = values(matrix)
    step = width // workers
    by_columns = [matrix.take_columns(i * step, (i + 1) * step) for i in range(workers)]
    np.testing.assert_array_equal(np.hstack([part.dequantize() for part in by_columns]), expected)
    by_rows = [matrix.take_rows(slice(i * 10 // workers, (i + 1) * 10 // workers)) for i in range(workers)]
    np.testing.assert_array_equal(np.vstack([part.dequantize() for part in by_rows]), expected)
    both = by_columns[-1].take_rows(np.array([7, 2, 2]))
    np.testing.assert_array_equal(both.dequantize(), expected[[7, 2, 2], -step:])
    # Again: a part is a matrix like any other.
    np.testing.assert_array_equal(by_columns[-1].take_columns(5, 20).dequantize(), expected[:, -step:][:, 5:20])


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_splits_of_fp8_are_the_whole(block: tuple[int, int], workers: int) -> None:
    matrix = fp8(24, 240, block)
    expected = values(matrix)
    step = 240 // workers
    by_columns = [matrix.take_columns(i * step, (i + 1) * step).dequantize() for i in range(workers)]
    np.testing.assert_array_equal(np.hstack(by_columns), expected)
    rows = 24 // workers
    by_rows = [matrix.take_rows(slice(i * rows, (i + 1) * rows)).dequantize() for i in range(workers)]
    np.testing.assert_array_equal(np.vstack(by_rows), expected)
    np.testing.assert_array_equal(matrix.take_rows(np.array([20, 3])).dequantize(), expected[[20, 3]])


def test_groups_that_splits_keep_whole_stay_as_they_are() -> None:
    matrix = grouped(4, 256, 4, 64)
    assert matrix.take_columns(128, 256).group_size == 64
    assert matrix.take_columns(128, 256).scales.shape == (4, 2)
    assert matrix.take_columns(32, 256).group_size == 32
    assert fp8(4, 256, (1, 64)).take_columns(128, 256).block == (1, 64)


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (3, 3), (4, 3), (0, 97)])
def test_columns_beyond_the_width_are_refused(start: int, stop: int) -> None:
    for matrix in (grouped(4, 96, 4, 32), fp8(4, 96, (1, 96))):
        with pytest.raises(ValueError, match="of 96"):
            matrix.take_columns(start, stop)


def test_parts_that_do_not_fit_are_refused() -> None:
    codes, scales = np.zeros((4, 96), np.uint8), np.ones((4, 2), np.float32)
    zeros = np.zeros((4, 2), np.int16)
    index = np.zeros(96, np.int32)
    GroupedMatrix(4, codes, scales, zeros, 64)
    with pytest.raises(ValueError, match="2 groups of 32 for 96"):
        GroupedMatrix(4, codes, scales, zeros, 32)
    with pytest.raises(ValueError, match="groups of 0"):
        GroupedMatrix(4, codes, scales, zeros, 0)
    with pytest.raises(ValueError, match="for 4 rows"):
        GroupedMatrix(4, codes, scales[:3], zeros[:3], 64)
    with pytest.raises(ValueError, match="zeros"):
        GroupedMatrix(4, codes, scales, zeros[:, :1], 64)
    for wrong in (index[:-1], index + 2, index - 1):
        with pytest.raises(ValueError, match="a group index"):
            GroupedMatrix(4, codes, scales, zeros, 64, wrong)
    with pytest.raises(ValueError, match="in blocks of"):
        Fp8Matrix(codes, scales, (4, 32))


def test_codes_of_fp8_are_torchs() -> None:
    codes = np.arange(256, dtype=np.uint8)
    np.testing.assert_array_equal(fp8_values(), torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy())
    finite = fp8_values()[np.isfinite(fp8_values())]
    np.testing.assert_array_equal(fp8_values()[fp8_codes(finite)], finite)


def test_rounding_to_fp8_is_torchs() -> None:
    draw = np.random.default_rng(0)
    near = fp8_values()[:126].astype(np.float64)
    middles = (near[1:] + near[:-1]) / 2  # ties, all exact in fp32
    magnitudes = np.concatenate((middles, np.nextafter(middles.astype(np.float32), 1e9), draw.uniform(0, 448, 2000),
                                 np.exp2(draw.uniform(-14, 8.7, 2000)), [0, 448]))  # fmt: skip
    both = np.concatenate((magnitudes, -magnitudes)).astype(np.float32)
    expected = torch.from_numpy(both).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    np.testing.assert_array_equal(fp8_codes(both), expected)


def test_fp8_ends_at_its_largest_and_keeps_nan() -> None:
    found = fp8_values()[fp8_codes(np.array([449, 1e30, np.inf, -np.inf, np.nan], np.float32))]
    np.testing.assert_array_equal(found, [448, 448, 448, -448, np.nan])
