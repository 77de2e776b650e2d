"""GPTQ against its definition: remove a column from the inverse, spread its error, in float64."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.common.errors import QuireError, Reason
from services.executor.quant.matrix import GroupedMatrix
from services.executor.quantize import gptq
from services.executor.quantize.grid import Grid, fit_closest, round_to_nearest
from services.executor.quantize.moments import output_error

Correlated = Callable[..., tuple[Tensor, Tensor]]


def plain_gptq(weight: Tensor, hessian: Tensor, grid: Grid, order: list[int]) -> Tensor:
    """Codes [N, K], column by column, with the whole inverse kept up to date."""
    w = weight.double()[:, order]
    h = hessian.double()[order][:, order]
    inverse = torch.linalg.inv(h + gptq.DAMPING * h.diagonal().mean() * torch.eye(len(h), dtype=torch.float64))
    cost = torch.linalg.cholesky(inverse, upper=True).diagonal().float() ** -2
    codes = torch.empty_like(w)
    width = grid.width(w.shape[1])
    for i in range(w.shape[1]):
        if i % width == 0:
            numbers = fit_closest(w[:, i : i + width].float(), grid, cost[i : i + width])
        scale, zero = numbers.scale.double(), numbers.zero.double()
        codes[:, i] = (torch.round(w[:, i] / scale) + zero).clamp(0, grid.levels)
        error = (w[:, i] - (codes[:, i] - zero) * scale) / inverse[i, i]
        w[:, i:] -= torch.outer(error, inverse[i, i:])
        inverse -= torch.outer(inverse[:, i], inverse[i]) / inverse[i, i]
    found = torch.empty_like(codes)
    found[:, order] = codes
    return found.to(torch.uint8)


def each_alone(weight: Tensor, grid: Grid) -> NDArray[np.uint8]:
    """Codes of the closest fits."""
    groups = weight.view(len(weight), -1, grid.width(weight.shape[1]))
    codes = fit_closest(groups, grid, torch.ones(groups.shape[2])).codes(groups, grid)
    return codes.view(weight.shape).to(torch.uint8).numpy()


def error_of(matrix: GroupedMatrix, weight: Tensor, gram: Tensor) -> float:
    return output_error(torch.from_numpy(matrix.dequantize()) - weight, gram)


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize(
    ("bits", "group_size", "is_symmetric", "columns"),
    [
        (4, 32, True, 96),
        (3, 64, False, 320),
        (2, None, True, 160),
        (4, 128, False, 200),  # a short last group
        (4, 256, True, 384),  # groups of several blocks
        (8, 48, True, 144),
    ],
)
def test_equals_a_plain_reference(
    correlated: Correlated, bits: int, group_size: int | None, is_symmetric: bool, columns: int, act_order: bool
) -> None:
    weight, inputs = correlated(24, columns)
    hessian, grid = inputs.T @ inputs, Grid(bits, group_size, is_symmetric, torch.float16)
    found = gptq.quantize(weight, gptq.find_compensation(hessian, by_importance=act_order), grid)
    order = sorted(range(columns), key=lambda i: -float(hessian[i, i])) if act_order else list(range(columns))
    expected = plain_gptq(weight, hessian, grid, order)
    # In fp32 a weight halfway between two numbers may fall to the other side, and its row goes another way then.
    same_rows = (torch.from_numpy(found.codes) == expected).all(1)
    assert int(same_rows.sum()) >= 22
    width = grid.width(columns)
    if act_order:
        assert found.group_index is not None
        assert [int(found.group_index[column]) for column in order] == [place // width for place in range(columns)]
    else:
        assert found.group_index is None


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_outputs_err_less_than_rounding_to_nearest(correlated: Correlated, bits: int, act_order: bool) -> None:
    weight, inputs = correlated(48, 256)
    gram = inputs.T @ inputs
    for is_symmetric in (True, False):
        grid = Grid(bits, 64, is_symmetric, torch.float16)
        ours = gptq.quantize(weight, gptq.find_compensation(gram, by_importance=act_order), grid)
        most = 0.6 if bits > 2 else 0.9
        assert error_of(ours, weight, gram) < most * error_of(round_to_nearest(weight, grid), weight, gram)


def test_independent_inputs_leave_nothing_to_make_up_for() -> None:
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    grid = Grid(4, 32, True, torch.float16)
    found = gptq.quantize(weight, gptq.find_compensation(torch.eye(64), by_importance=False), grid)
    assert (found.codes == each_alone(weight, grid)).all()


def test_inputs_that_are_always_zero_and_too_little_text(correlated: Correlated) -> None:
    """The moments have no inverse; damping gives them one."""
    weight, inputs = correlated(8, 64)
    inputs = inputs[:10].clone()
    inputs[:, 5] = 0
    gram = inputs.T @ inputs
    grid = Grid(4, 32, True, torch.float16)
    for act_order in (False, True):
        found = gptq.quantize(weight, gptq.find_compensation(gram, by_importance=act_order), grid)
        assert error_of(found, weight, gram) < error_of(round_to_nearest(weight, grid), weight, gram)
    nothing = gptq.find_compensation(torch.zeros(64, 64), by_importance=False)
    assert (gptq.quantize(weight, nothing, grid).codes == each_alone(weight, grid)).all()


def test_activations_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(QuireError) as refused:
        gptq.find_compensation(torch.full((4, 4), torch.nan), by_importance=False)
    assert refused.value.reason is Reason.NOT_FINITE
