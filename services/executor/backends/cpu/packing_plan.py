"""Decides the format and the place of every packed matrix and vector, from a checkpoint's header alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce

from services.executor.backends.cpu.formats import FORMATS, PANEL_ROWS, choose, more_precise, panel_bytes
from services.executor.backends.cpu.layout import (
    MatrixLayout,
    VectorLayout,
    matrix_layouts,
    pad,
    tensors_of,
    vector_layouts,
)
from services.executor.backends.cpu.packed_weights import PackedMatrix
from services.executor.models.spec import ModelSpec

ALIGNMENT = 64

_KEPT = {
    ("F32", "f32"),
    ("BF16", "bf16"),
    ("Q4_0", "q4g32"),
    ("Q4_0", "q4mg32"),
    ("Q4_0", "q8"),
    ("Q4_1", "q4mg32"),
    ("Q4_K", "q4k"),
    ("Q5_0", "q8"),
    ("Q6_K", "q6k"),
    ("Q8_0", "q8"),
}
"""Stored and packed formats between which nothing is lost."""


@dataclass(frozen=True, slots=True)
class PlacedMatrix:
    layout: MatrixLayout
    format: str
    offset: int

    @property
    def packed(self) -> PackedMatrix:
        return PackedMatrix(FORMATS[self.format], self.layout.rows, self.layout.columns.k, self.offset)

    @property
    def panel_bytes(self) -> int:
        return panel_bytes(self.format, self.layout.columns.k)


@dataclass(frozen=True, slots=True)
class PlacedVector:
    layout: VectorLayout
    offset: int


@dataclass(frozen=True, slots=True)
class PackingPlan:
    """Matrices and vectors in the order of their offsets."""

    matrices: tuple[PlacedMatrix, ...]
    vectors: tuple[PlacedVector, ...]
    size: int  # bytes of the buffer
    conversions: tuple[str, ...]  # what is not packed as it is stored: "Q6_K as q8 x 11"

    @property
    def formats(self) -> str:
        """How many matrices have which format: "q4mg32 x 180, q8 x 1"."""
        return ", ".join(_counted(matrix.format for matrix in self.matrices))


def make_plan(spec: ModelSpec, stored: Mapping[str, str], wanted: str) -> PackingPlan:
    """The plan for tensors in the formats `stored`; `wanted` is auto or the format that matrices should have."""
    matrices, vectors, conversions, offset = [], [], [], 0
    for layout in matrix_layouts(spec):
        names = tensors_of(layout.strips)
        format_ = reduce(more_precise, (choose(stored[name], wanted, layout.columns.run) for name in names))
        matrices.append(PlacedMatrix(layout, format_, offset))
        offset += pad(layout.rows // PANEL_ROWS * matrices[-1].panel_bytes, ALIGNMENT)
        conversions += [f"{stored[name]} as {format_}" for name in names if (stored[name], format_) not in _KEPT]
    for vector in vector_layouts(spec):
        vectors.append(PlacedVector(vector, offset))
        offset += pad(vector.length * 4, ALIGNMENT)
    return PackingPlan(tuple(matrices), tuple(vectors), offset, tuple(_counted(conversions)))


def _counted(names: Iterable[str]) -> list[str]:
    return [f"{name} x {count}" for name, count in Counter(names).items()]
