"""GPTQ (Frantar et al. 2022): columns are rounded one after the other, and those that follow make up for the error.

For outputs W x with inputs whose second moments are H, rounding column i by an error e costs least where the later
columns move by -e * U[i, i:] / U[i, i], with U the upper triangular factor of H ** -1 = U.T @ U.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from services.common.errors import QuireError, Reason
from services.executor.quant.matrix import GroupedMatrix
from services.executor.quantize.grid import Grid, Numbers, fit_closest, grouped

DAMPING = 0.01
"""Part of the mean of H's diagonal that is added to it."""

_BLOCK = 128  # columns whose errors reach the columns behind the block in one product
_ATTEMPTS = 5


@dataclass(frozen=True, slots=True)
class Compensation:
    """What all matrices share that multiply the same inputs."""

    order: Tensor  # [K] int64: the columns in the order of their rounding
    factor: Tensor  # [K, K] upper triangular, in that order
    is_ordered: bool  # by importance; otherwise the order is the columns' own


def find_compensation(hessian: Tensor, *, by_importance: bool, damping: float = DAMPING) -> Compensation:
    """From second moments [K, K] of the inputs in any unit. `by_importance` takes the largest inputs first (act-order).

    Damping is raised where the moments cannot be inverted otherwise. Raises NOT_FINITE where they hold no numbers.
    """
    diagonal = hessian.diagonal()
    if not bool(diagonal.isfinite().all()):
        raise QuireError(Reason.NOT_FINITE, "the model's activations are not finite")
    count = len(hessian)
    order = torch.argsort(diagonal, descending=True, stable=True) if by_importance else torch.arange(count)
    damped = hessian[order][:, order] if by_importance else hessian.clone()
    # Inputs that are always zero: their weights matter to nobody.
    damped.diagonal()[damped.diagonal() == 0] = max(float(diagonal.mean()), torch.finfo(torch.float32).tiny)
    step = damping * float(damped.diagonal().mean())
    for attempt in range(_ATTEMPTS):
        damped.diagonal().add_(step if attempt == 0 else step * 9 * 10 ** (attempt - 1))
        # H = R R.T with R upper triangular, so H ** -1 = (R ** -1).T @ R ** -1.
        lower, failed = torch.linalg.cholesky_ex(damped.flip(0, 1))
        if not failed:
            upper = lower.flip(0, 1)
            factor = torch.linalg.solve_triangular(upper, torch.eye(count), upper=True)
            return Compensation(order, factor, by_importance)
    raise QuireError(Reason.NOT_FINITE, "the second moments of the model's activations cannot be inverted")


def quantize(weight: Tensor, compensation: Compensation, grid: Grid) -> GroupedMatrix:
    """A matrix [N, K] fp32. Scales of a group are found when its turn comes, from what its weights are by then."""
    order, factor = compensation.order, compensation.factor
    columns = weight.t()[order].contiguous()  # [K, N], so that a column lies together
    width = grid.width(len(columns))
    codes = torch.empty(columns.shape, dtype=torch.uint8)
    numbers: list[Numbers] = []

    def rounded(index: int, column: Tensor) -> Tensor:
        if index % width == 0:
            cost = factor.diagonal()[index : index + width] ** -2  # of a column's error, once the later ones moved
            numbers.append(fit_closest(columns[index : index + width].t(), grid, cost))
        own = numbers[-1]
        found = torch.round(column / own.scale).add_(own.zero).clamp_(0, grid.levels)
        codes[index] = found
        return (found - own.zero).mul_(own.scale)

    # Blocks begin where groups do, which are fitted to what their columns are by then.
    block = math.gcd(width, _BLOCK) if _BLOCK < width < len(columns) else min(width, _BLOCK)
    round_in_turn(columns, factor, rounded, block)
    place = torch.argsort(order)
    index = place // width if compensation.is_ordered else None
    return grouped(codes[place].t().contiguous(), numbers, width, grid, index)


def round_in_turn(
    columns: Tensor, factor: Tensor, rounded: Callable[[int, Tensor], Tensor], block: int = _BLOCK
) -> None:
    """Rounds columns [K, N] one after the other; those that follow move in place by what makes up for each.

    `rounded` gets a column's index and what it is by then, and says what it becomes, both [N]. Within a block columns
    move at once, those behind it when it ends: where one begins, all columns have moved for what came before.
    """
    count = len(columns)
    diagonal = factor.diagonal().tolist()
    for start in range(0, count, block):
        stop = min(start + block, count)
        errors = torch.empty_like(columns[start:stop])  # in units of the factor
        for i in range(start, stop):
            error = errors[i - start]
            torch.sub(columns[i], rounded(i, columns[i]), out=error).div_(diagonal[i])
            columns[i + 1 : stop].addr_(factor[i, i + 1 : stop], error, alpha=-1)
        columns[stop:].addmm_(factor[start:stop, stop:].t(), errors, alpha=-1)
