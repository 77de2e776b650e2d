"""Where the columns of a grouped matrix go, so that the groups of a native format hold columns of one group each.

Groups that are neighbours stay where they are. Where a checkpoint names a group for each column (act-order), or padding
comes between columns of a group, columns are sorted by group, and the kernels gather their inputs in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from services.executor.backends.cpu.formats import F8_BLOCK
from services.executor.backends.cpu.layout import Columns, Int32
from services.executor.quant.matrix import Fp8Format, GroupedFormat, QuantizedFormat

_SIZES = (128, 64, 32)


@dataclass(frozen=True, slots=True)
class Grouping:
    """A quantized tensor as far as the choice of a format goes."""

    format: QuantizedFormat
    groups: Int32  # [K]: each column's


@dataclass(frozen=True, slots=True)
class Fit:
    """What holds a quantized tensor, and whether it holds the same codes and scales."""

    format: str
    is_exact: bool


def grouping(format_: QuantizedFormat, width: int, group_index: Int32 | None = None) -> Grouping:
    """Of a tensor of `width` columns, with its group index if it has one."""
    if group_index is None:
        size = format_.block[1] if isinstance(format_, Fp8Format) else format_.group_size
        group_index = np.arange(width, dtype=np.int32) // np.int32(min(size, width))
    return Grouping(format_, group_index)


def fit(tensor: Grouping, source: Int32) -> Fit:
    """The native format for a tensor whose columns lie as `source` [k] says: a column's number, -1 for padding."""
    groups = np.where(source < 0, np.int32(-1), tensor.groups[source])
    match tensor.format:
        case Fp8Format():
            return Fit("f8", True) if groups_of_parts(groups, F8_BLOCK) is not None else Fit("q8", False)
        case GroupedFormat(bits=bits, is_symmetric=is_symmetric):
            if bits > 4:
                fits = is_symmetric or bits < 8
                if fits and not tensor.groups.any():
                    return Fit("q8c", True)
                return Fit("q8", fits and groups_of_parts(groups, 32) is not None)
            kind = "q4g" if is_symmetric or bits < 4 else "q4zg"
            for size in _SIZES:
                if len(groups) % size == 0 and groups_of_parts(groups, size) is not None:
                    return Fit(f"{kind}{size}", True)
            return Fit("q8", False)


def choose_order(columns: Columns, tensors: Sequence[Grouping]) -> Int32 | None:
    """One order for the columns of matrices that share their inputs; None where their own order is as good.

    int32 [k]: the tensor's column in each place, -1 for padding.
    """
    natural = [fit(tensor, columns.source).is_exact for tensor in tensors]
    if all(natural):
        return None
    # From the coarsest groups on: finer ones within them stay whole. Groups that fill no whole parts come last.
    keys = []
    for tensor in sorted(tensors, key=lambda tensor: int(tensor.groups.max())):
        sizes = np.bincount(tensor.groups)
        keys += [sizes[tensor.groups] % _SIZES[-1] != 0, tensor.groups]
    source = np.full(columns.k, -1, np.int32)
    source[: len(keys[0])] = np.lexsort(keys[::-1])
    ordered = [fit(tensor, source).is_exact for tensor in tensors]
    return source if sum(ordered) > sum(natural) else None


def groups_of_parts(groups: Int32, size: int) -> Int32 | None:
    """The group of every `size` places (the last may be fewer), -1 where all are padding.

    `groups` [k] has each place's group, -1 for padding. None where some part holds columns of two groups.
    """
    parts = np.pad(groups, (0, -len(groups) % size), constant_values=-1).reshape(-1, size)
    found: Int32 = parts.max(axis=1)
    return found if ((parts < 0) | (parts == found[:, None])).all() else None
