"""e4m3: each weight at the nearest number of its block."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from services.executor.quant.matrix import Fp8Matrix, fp8_values
from services.executor.quantize import fp8, gptq
from services.executor.quantize.moments import output_error

Correlated = Callable[..., tuple[Tensor, Tensor]]


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


BLOCKS = [(1, 200), (24, 200), (16, 128)]


@pytest.mark.parametrize("block", BLOCKS)
def test_compensation_equals_a_plain_reference(correlated: Correlated, block: tuple[int, int]) -> None:
    """The definition, in float64: a rounded column leaves the inverse, and its error spreads over the others."""
    weight, inputs = correlated(24, 200)
    hessian = inputs.T @ inputs
    compensation = gptq.find_compensation(hessian, by_importance=True)
    found = fp8.quantize_compensated(weight, compensation, block, torch.bfloat16)
    scales = torch.from_numpy(fp8.quantize(weight, block, torch.bfloat16).scales).double()
    assert torch.equal(torch.from_numpy(found.scales).double(), scales)

    order = compensation.order
    spread = scales.repeat_interleave(block[0], 0)[:24].repeat_interleave(block[1], 1)[:, :200][:, order]
    left, h = weight.double()[:, order], hessian.double()[order][:, order]
    inverse = torch.linalg.inv(h + gptq.DAMPING * h.diagonal().mean() * torch.eye(len(h), dtype=torch.float64))
    expected = torch.empty_like(left)
    for i in range(left.shape[1]):
        nearest = (left[:, i] / spread[:, i]).clamp(-448, 448).to(torch.float8_e4m3fn).double() * spread[:, i]
        left[:, i:] -= torch.outer((left[:, i] - nearest) / inverse[i, i], inverse[i, i:])
        inverse -= torch.outer(inverse[:, i], inverse[i]) / inverse[i, i]
        expected[:, i] = nearest
    same_rows = torch.isclose(torch.from_numpy(found.dequantize()).double()[:, order], expected, rtol=1e-6).all(1)
    assert int(same_rows.sum()) >= 22  # fp32 may put a weight halfway between two numbers to the other side


@pytest.mark.parametrize("block", BLOCKS)
def test_compensated_outputs_err_less(correlated: Correlated, block: tuple[int, int]) -> None:
    weight, inputs = correlated(48, 200)
    gram = inputs.T @ inputs
    compensation = gptq.find_compensation(gram, by_importance=True)

    def error(matrix: Fp8Matrix) -> float:
        return output_error(torch.from_numpy(matrix.dequantize()) - weight, gram)

    compensated = fp8.quantize_compensated(weight, compensation, block, torch.bfloat16)
    assert error(compensated) < 0.8 * error(fp8.quantize(weight, block, torch.bfloat16))
