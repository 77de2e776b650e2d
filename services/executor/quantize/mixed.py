"""Bits where they matter: a grid for each layer's groups of matrices, within a number of bits per weight.

Matrices that multiply the same inputs share a grid, since other programs hold them as one matrix.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from services.common.errors import invalid
from services.executor.models.spec import ModelSpec
from services.executor.models.weights import Shape, expected_shapes
from services.executor.quant.bits import word_count
from services.executor.quantize.allocation import Option, allocate
from services.executor.quantize.grid import Grid
from services.executor.quantize.layer import GROUPS, matrix_names


def stored_bytes(shape: Shape, grid: Grid) -> int:
    """Of a matrix [N, K] in GPTQ's format: codes, scales, zero points and the groups of columns."""
    rows, columns = shape
    groups = -(-columns // grid.width(columns))
    words = rows * word_count(columns, grid.bits) + groups * word_count(rows, grid.bits) + columns
    return 4 * words + 2 * groups * rows


def check_bits(grids: Sequence[Grid], spec: ModelSpec, bits_per_weight: float) -> None:
    """Raises INVALID_FIELD where so many bits do not suffice for the smallest of the grids."""
    shapes = expected_shapes(spec)
    matrices = [shapes[name] for name in matrix_names(spec)]
    smallest = min(sum(stored_bytes(shape, grid) for shape in matrices) for grid in grids)
    weights = sum(map(math.prod, matrices))
    if _budget(bits_per_weight, weights) < smallest:
        least = 8 * smallest / weights
        raise invalid("--bits-per-weight", f"{bits_per_weight:g} is too few; the least is {least:.3f}")


def spend(losses: Mapping[str, Mapping[Grid, float]], spec: ModelSpec, bits_per_weight: float) -> dict[str, Grid]:
    """A grid for every matrix by canonical name, from losses by group (`layers.3.qkv`) and grid.

    Bits count all that is stored of the layers' matrices. ValueError where they are too few (`check_bits`).
    """
    shapes = expected_shapes(spec)
    weights = sum(math.prod(shapes[name]) for name in matrix_names(spec))
    options = {
        group: [
            Option(grid, sum(stored_bytes(shapes[name], grid) for name in members(group)), loss)
            for grid, loss in own.items()
        ]
        for group, own in losses.items()
    }
    chosen = allocate(options, _budget(bits_per_weight, weights))
    return {name: option.grid for group, option in chosen.items() for name in members(group)}


def _budget(bits_per_weight: float, weights: int) -> int:
    """Bytes."""
    return int(bits_per_weight * weights / 8)


def members(group: str) -> Sequence[str]:
    """Canonical names of a group's matrices."""
    layer, _, own = group.rpartition(".")
    return [f"{layer}.{name}" for name in GROUPS[own]]
