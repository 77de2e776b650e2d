"""e4m3: each weight at the nearest number of its block."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from services.executor.quant.matrix import fp8_values
from services.executor.quantize import fp8


@pytest.mark.parametrize(
    ("block", "count"), [((1, 200), (140, 1)), ((140, 200), (1, 1)), ((128, 128), (2, 2)), ((1000, 1000), (1, 1))]
)
def test_each_weight_gets_the_nearest_number(block: tuple[int, int], count: tuple[int, int]) -> None:
    weight = torch.randn(140, 200, generator=torch.Generator().manual_seed(0))
    weight[:, 5] *= 100
    matrix = fp8.quantize(weight, block, torch.bfloat16)
    assert matrix.scales.shape == count
    numbers = np.sort(fp8_values()[np.isfinite(fp8_values())])
    for row, column in ((0, 0), (3, 5), (127, 127), (128, 128), (139, 199)):
        scale = matrix.scales[row // matrix.block[0], column // matrix.block[1]]
        wanted = weight[row, column].item()
        assert abs(matrix.dequantize()[row, column] - wanted) == pytest.approx(
            np.abs(numbers * scale - wanted).min(), abs=1e-6
        )
    relative = np.abs(matrix.dequantize() - weight.numpy()) / np.maximum(np.abs(weight.numpy()), 0.02)
    assert relative[:, 5].max() < 0.066  # half a step of 3 bits, and the scale's own rounding at the end of the range
    assert np.array_equal(torch.from_numpy(matrix.scales).bfloat16().float().numpy(), matrix.scales)


def test_zeros_stay_zeros() -> None:
    assert not fp8.quantize(torch.zeros(4, 8), (1, 8), torch.bfloat16).dequantize().any()
