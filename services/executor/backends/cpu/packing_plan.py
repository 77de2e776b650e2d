"""Decides the format and the place of every packed matrix and vector, from a checkpoint's header alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from itertools import groupby
from types import MappingProxyType

import numpy as np

from services.executor.backends.cpu.column_order import Fit, Grouping, choose_order, fit, grouping
from services.executor.backends.cpu.formats import FORMATS, PANEL_ROWS, choose, more_precise, panel_bytes
from services.executor.backends.cpu.layout import (
    Int32,
    MatrixLayout,
    VectorLayout,
    matrix_layouts,
    pad,
    tensors_of,
    vector_layouts,
)
from services.executor.backends.cpu.packed_weights import PackedMatrix
from services.executor.models.spec import ModelSpec
from services.executor.models.weights import Checkpoint, Format, QuantizedTensor
from services.executor.quant.matrix import GroupedFormat, GroupedMatrix

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
    order: Int32 | None = None  # the tensors' column in each place, -1 for padding; None: those of the layout

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
class PlacedOrder:
    name: str
    inputs: Int32  # [k]: the input that each column multiplies, -1 for none
    offset: int


@dataclass(frozen=True, slots=True)
class PackingPlan:
    """Matrices, orders and vectors in the order of their offsets."""

    matrices: tuple[PlacedMatrix, ...]
    orders: tuple[PlacedOrder, ...]
    vectors: tuple[PlacedVector, ...]
    size: int  # bytes of the buffer
    conversions: tuple[str, ...]  # what is not packed as it is stored: "Q6_K as q8 x 11"

    @property
    def formats(self) -> str:
        """How many matrices have which format: "q4mg32 x 180, q8 x 1"."""
        return ", ".join(_counted(matrix.format for matrix in self.matrices))


def plan_for(checkpoint: Checkpoint, wanted: str) -> PackingPlan:
    """The plan for a checkpoint; reads nothing but the orders of columns that it names."""
    formats = checkpoint.formats()
    indices = {}
    for name, format_ in formats.items():
        if wanted == "auto" and isinstance(format_, GroupedFormat) and format_.is_ordered:
            tensor = checkpoint.tensor(name)
            assert isinstance(tensor, QuantizedTensor)
            row = tensor.read(0, 1)
            assert isinstance(row, GroupedMatrix)
            indices[name] = row.column_groups()
    return make_plan(checkpoint.spec, formats, wanted, indices)


def make_plan(
    spec: ModelSpec,
    stored: Mapping[str, Format],
    wanted: str,
    group_indices: Mapping[str, Int32] = MappingProxyType({}),
) -> PackingPlan:
    """The plan for tensors in the formats `stored`; `wanted` is auto or the format that matrices should have.

    `group_indices` has the group of each column of tensors that name them.
    """
    matrices, orders, vectors, offset = [], [], [], 0
    conversions = []
    for inputs, layouts in groupby(matrix_layouts(spec), key=lambda layout: layout.inputs):
        members = list(layouts)
        columns = members[0].columns
        groupings: dict[str, Grouping] = {}
        for name in (name for layout in members for name in tensors_of(layout.strips)):
            format_ = stored[name]
            if wanted == "auto" and not isinstance(format_, str):
                groupings[name] = grouping(format_, columns.runs * columns.size, group_indices.get(name))
        # Rows of an embedding are looked up, and give inputs themselves.
        order = choose_order(columns, list(groupings.values())) if inputs != "embedding" else None
        source = columns.source if order is None else order
        for layout in members:
            fits = {name: _fit(stored[name], wanted, columns.run, groupings.get(name), source)
                    for name in tensors_of(layout.strips)}  # fmt: skip
            packed = reduce(more_precise, (found.format for found in fits.values()))
            matrices.append(PlacedMatrix(layout, packed, offset, order))
            offset += pad(layout.rows // PANEL_ROWS * matrices[-1].panel_bytes, ALIGNMENT)
            conversions += [f"{stored[name]} as {packed}" for name, found in fits.items()
                            if not _is_kept(stored[name], found, packed)]  # fmt: skip
        if order is not None:
            places = np.flatnonzero(columns.source >= 0).astype(np.int32)  # of the columns among the inputs
            orders.append(PlacedOrder(f"{inputs}_order", np.where(order < 0, np.int32(-1), places[order]), offset))
            offset += pad(columns.k * 4, ALIGNMENT)
    for vector in vector_layouts(spec):
        vectors.append(PlacedVector(vector, offset))
        offset += pad(vector.length * 4, ALIGNMENT)
    return PackingPlan(tuple(matrices), tuple(orders), tuple(vectors), offset, tuple(_counted(conversions)))


def _fit(stored: Format, wanted: str, run: int, tensor: Grouping | None, source: Int32) -> Fit:
    if tensor is not None:
        return fit(tensor, source)
    return Fit(choose(stored if isinstance(stored, str) else "", wanted, run), is_exact=True)


def _is_kept(stored: Format, found: Fit, packed: str) -> bool:
    if isinstance(stored, str):
        return (stored, packed) in _KEPT
    # Narrower groups, zero points and more bits hold the same codes.
    from_four = found.format.startswith(("q4g", "q4z")) and packed.startswith(("q4g", "q4z", "q8"))
    return found.is_exact and (packed == found.format or (from_four and packed != "q8c"))


def _counted(names: Iterable[str]) -> list[str]:
    return [f"{name} x {count}" for name, count in Counter(names).items()]
