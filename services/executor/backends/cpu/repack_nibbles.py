"""4 bits in groups to packed formats that hold the same codes: nibbles change their places in words, no more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from kernels import _native
from services.executor.backends.cpu.column_order import groups_of_parts
from services.executor.backends.cpu.formats import group_bytes, group_size, has_zero
from services.executor.backends.cpu.gather import Gather
from services.executor.backends.cpu.layout import Int32
from services.executor.backends.cpu.panels import EncodedRows, UnfitWeights, write_rows
from services.executor.backends.cpu.quantize import to_half
from services.executor.models.weights import Bytes, QuantizedTensor
from services.executor.quant.matrix import GroupedFormat, GroupedMatrix
from services.executor.quant.nibbles import BITS, NibbleMatrix, aligned


@dataclass(frozen=True, slots=True)
class NibbleEncoder:
    """Packs rows of one tensor."""

    format: str
    read: Callable[[int, int], NibbleMatrix]
    columns: Int32 | None  # of the stored matrix, in the packed one's order; None: as they are
    groups: Gather  # the stored scale of each packed group

    @classmethod
    def of(cls, format_: str, tensor: QuantizedTensor, source: Int32) -> NibbleEncoder | None:
        """None where codes or groups do not stay what they are, or columns of zeros come between."""
        stored, read = tensor.format, tensor.read_nibbles
        if read is None or not isinstance(stored, GroupedFormat) or not format_.startswith(("q4g", "q4z")):
            return None
        if (source < 0).any() or not (stored.is_symmetric or has_zero(format_)):
            return None
        row = tensor.read(0, 1)
        assert isinstance(row, GroupedMatrix)
        groups = groups_of_parts(row.column_groups()[source], group_size(format_))
        if groups is None:
            return None
        is_same = np.array_equal(source, np.arange(tensor.shape[1]))
        return cls(format_, read, None if is_same else source, Gather.of(groups, row.scales.shape[1]))

    def write(self, panels: Bytes, lanes: slice, rows: Int32) -> int:
        """Fills lanes of panels [P, bytes of a panel] with rows by number, -1 being one of zeros.

        How many scales were rounded. Raises UnfitWeights.
        """
        found = self._take(rows)
        halves, rounded = to_half(self.groups.take(found.scales))
        zeros = self.groups.take(found.zeros)
        if has_zero(self.format):
            numbers = EncodedRows(None, halves, zeros=zeros.astype(np.int8))
        elif (zeros == 1 << (BITS - 1)).all():
            numbers = EncodedRows(None, halves)
        else:
            raise UnfitWeights("has zero points other than its format says")
        words = aligned(found.words)
        size, group = group_size(self.format), group_bytes(self.format)
        _native.repack_nibbles(words, panels, lanes.start, size, group, self.columns)
        write_rows(self.format, panels, lanes, numbers)
        return rounded

    def _take(self, rows: Int32) -> NibbleMatrix:
        is_real = rows >= 0
        wanted = rows
        if not is_real.all():
            real = rows[is_real] if is_real.any() else np.zeros(1, np.int32)
            wanted = real[np.maximum(np.cumsum(is_real) - 1, 0)]
        first = int(wanted.min())
        found = self.read(first, int(wanted.max()) + 1)
        if found.words.shape[1] != len(rows) or (np.diff(wanted) != 1).any():
            found = found.take_rows(wanted - first)
        # A row of zeros is some other one times zero.
        return found if wanted is rows else replace(found, scales=found.scales * is_real[:, None])
