"""Which columns share a scale: group sizes as labels state them, and indices that files hold."""

from __future__ import annotations

import numpy as np

from services.executor.quant.matrix import Int32
from services.executor.quant.parts import StoredLayer

MOST_COLUMNS = 1 << 24
"""Of a group: indices stay in 32 bits."""


def group_width(layer: StoredLayer, group_size: int) -> int:
    """Columns of a group, -1 being all."""
    if group_size == -1:
        return layer.shape[1]
    if not 1 <= group_size <= MOST_COLUMNS:
        raise layer.refused(f"a group size of {group_size}")
    return group_size


def group_count(columns: int, width: int) -> int:
    """The last group may be short."""
    return -(-columns // width)


def group_index(layer: StoredLayer, part: str, width: int, *, is_needed: bool) -> Int32 | None:
    """The groups of columns [K] that a file states; None where groups are neighbours.

    Files without act-order hold none, one that was never filled, or one that says the same. MODEL_LOAD_FAILED where
    act-order is stated and no index is there, or where groups have other sizes than they should.
    """
    columns = layer.shape[1]
    plain = np.arange(columns, dtype=np.int32) // np.int32(width)
    count = group_count(columns, width)
    index = layer.part(part, ("I32", "I64"), (columns,)).array() if part in layer.parts else None
    if index is None or (count > 1 and index[0] in (0, -1) and (index == index[0]).all()):
        if is_needed and count > 1:
            raise layer.refused(f"act-order is stated, but {part} does not say which column is in which group")
        return None
    if np.array_equal(index, plain):
        return None
    if index.min() < 0 or index.max() >= count:
        raise layer.refused(f"{part} names groups {index.min()} to {index.max()}; {columns} columns in groups of "
                            f"{width} have 0 to {count - 1}")  # fmt: skip
    sizes = np.bincount(index, minlength=count)
    if not np.array_equal(sizes, np.bincount(plain, minlength=count)):
        raise layer.refused(f"{part} puts {sizes.min()} to {sizes.max()} columns into groups of {width}")
    return index.astype(np.int32)
