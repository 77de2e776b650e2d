"""Grids: every weight at the nearest number, and numbers as they are stored."""

from __future__ import annotations

import pytest
import torch

from services.executor.quantize.grid import Grid, fit, fit_closest, round_to_nearest


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("is_symmetric", [True, False])
@pytest.mark.parametrize("group_size", [32, 64, None])
def test_each_weight_gets_the_nearest_number(bits: int, is_symmetric: bool, group_size: int | None) -> None:
    weight = torch.randn(6, 96, generator=torch.Generator().manual_seed(bits))
    grid = Grid(bits, group_size, is_symmetric, torch.float16)
    matrix = round_to_nearest(weight, grid)
    values = torch.from_numpy(matrix.dequantize())
    for column in range(96):
        group = column // grid.width(96)
        codes = torch.arange(1 << bits)
        numbers = (codes[None] - torch.from_numpy(matrix.zeros[:, group, None])) * torch.from_numpy(
            matrix.scales[:, group, None]
        )
        nearest = (numbers - weight[:, column, None]).abs().amin(1)
        assert torch.allclose((values[:, column] - weight[:, column]).abs(), nearest, atol=1e-6)
    assert matrix.format.is_symmetric == is_symmetric
    assert torch.equal(torch.from_numpy(matrix.scales).half().float(), torch.from_numpy(matrix.scales))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_whole_range_is_covered(dtype: torch.dtype) -> None:
    """No error above half a step, and the rounding of scales."""
    weight = torch.rand(4, 64, generator=torch.Generator().manual_seed(0)) * torch.tensor([[1], [1e-2], [-1], [30]])
    for grid in (Grid(4, 32, True, dtype), Grid(4, 32, False, dtype)):
        matrix = round_to_nearest(weight, grid)
        steps = torch.from_numpy(matrix.scales).repeat_interleave(32, 1)
        share = 0.56 if dtype == torch.bfloat16 else 0.51
        assert bool(((torch.from_numpy(matrix.dequantize()) - weight).abs() <= steps * share).all())


def test_groups_of_one_sign_keep_a_zero_point_above_zero() -> None:
    """The first GPTQ format cannot say 0."""
    weight = torch.stack((torch.rand(32) + 0.5, -torch.rand(32) - 0.5, torch.zeros(32)))
    for bits in (2, 3, 4, 8):
        numbers = fit(weight, Grid(bits, 32, False, torch.float16))
        assert bool((numbers.zero >= 1).all())
        assert bool((numbers.zero < 1 << bits).all())
        zeros = numbers.rounded(torch.zeros(3, 1), Grid(bits, 32, False, torch.float16))
        assert torch.equal(zeros, torch.zeros(3, 1))


def test_weights_of_zero_stay_zero() -> None:
    for is_symmetric in (True, False):
        matrix = round_to_nearest(torch.zeros(2, 64), Grid(4, 32, is_symmetric, torch.float16))
        assert not matrix.dequantize().any()


def test_weights_near_the_smallest_scale_stay_apart_from_zero() -> None:
    """A scale that fp16 would round to zero is its smallest number instead; without weights it is 1."""
    smallest = 2.0**-24
    weight = torch.tensor([[1.0, -3.0] * 16, [0.0] * 32]) * smallest
    for is_symmetric in (True, False):
        matrix = round_to_nearest(weight, Grid(8, 32, is_symmetric, torch.float16))
        assert matrix.scales.reshape(-1).tolist() == [smallest, 1.0]
        assert torch.equal(torch.from_numpy(matrix.dequantize()), weight)


def test_the_closest_fit_is_never_worse() -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(16, 64, generator=generator) ** 3
    importance = torch.rand(64, generator=generator)
    for grid in (Grid(3, None, True, torch.float16), Grid(3, None, False, torch.float16)):
        whole, best = fit(weight, grid), fit_closest(weight, grid, importance)

        def error(numbers: object) -> torch.Tensor:
            return ((numbers.rounded(weight, grid) - weight) ** 2 * importance).sum(1)  # type: ignore[attr-defined] # noqa: B023

        assert bool((error(best) <= error(whole)).all())
        assert float(error(best).sum()) < 0.9 * float(error(whole).sum())
