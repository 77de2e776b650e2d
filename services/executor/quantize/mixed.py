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


def spend(losses: Mapping[str, Mapping[Grid, float]], spec: ModelSpec, bits_per_weight: float) -> dict[str, Grid]:
    """A grid for every matrix by canonical name, from losses by group (`layers.3.qkv`) and grid.

    Bits count all that is stored of the layers' matrices. Raises INVALID_FIELD where they are too few.
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
    try:
        chosen = allocate(options, int(bits_per_weight * weights / 8))
    except ValueError as error:
        least = 8 * sum(min(option.bytes for option in own) for own in options.values()) / weights
        raise invalid("--bits-per-weight", f"{bits_per_weight:g} is too few; the least is {least:.3f}") from error
    return {name: option.grid for group, option in chosen.items() for name in members(group)}


def members(group: str) -> Sequence[str]:
    """Canonical names of a group's matrices."""
    layer, _, own = group.rpartition(".")
    return [f"{layer}.{name}" for name in GROUPS[own]]
