"""Quantized matrices in their neutral forms to packed words: the same codes and scales where a format holds them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from services.executor.backends.cpu.column_order import groups_of_parts
from services.executor.backends.cpu.formats import F8_BLOCK, group_size, has_zero
from services.executor.backends.cpu.gather import Gather
from services.executor.backends.cpu.layout import Int32
from services.executor.backends.cpu.panels import EncodedRows, UnfitWeights
from services.executor.backends.cpu.quantize import byte_words, encode, nibble_words, to_half
from services.executor.models.weights import QuantizedTensor
from services.executor.quant.matrix import (
    Fp8Format,
    Fp8Matrix,
    GroupedMatrix,
    Int16,
    QuantizedFormat,
    QuantizedMatrix,
    UInt8,
)

_F8_NAN = 0x7F


def take_rows(tensor: QuantizedTensor, rows: Int32) -> QuantizedMatrix:
    """These rows of a matrix; -1 is a row of zeros."""
    is_real = rows >= 0
    wanted = rows[is_real] if is_real.any() else np.zeros(1, np.int32)
    runs = np.split(wanted, np.flatnonzero(np.diff(wanted) != 1) + 1)
    parts = [tensor.read(int(run[0]), int(run[-1]) + 1) for run in runs]
    if is_real.all():
        return parts[0] if len(parts) == 1 else _joined(parts)
    # A row of zeros is some other one times zero.
    spread = _joined(parts).take_rows(np.maximum(np.cumsum(is_real) - 1, 0))
    return replace(spread, scales=spread.scales * is_real[:, None])


@dataclass(frozen=True, slots=True)
class QuantizedEncoder:
    """Packs rows of one tensor."""

    format: str
    columns: Gather
    groups: Gather | None  # the scale of each native group; None where the format does not hold such rows as they are

    @classmethod
    def of(cls, format_: str, tensor: QuantizedTensor, source: Int32) -> QuantizedEncoder:
        """Columns go where `source` [k] says: a column's number, -1 for padding."""
        size = _group_size(format_, tensor.format, len(source))
        row = tensor.read(0, 1)
        found = None if size is None else groups_of_parts(_in_places(_column_groups(row), source), size)
        groups = None if found is None else Gather.of(found, row.scales.shape[1])
        return cls(format_, Gather.of(source, tensor.shape[1]), groups)

    def encode(self, rows: QuantizedMatrix) -> EncodedRows:
        """Raises UnfitWeights."""
        found = None
        if self.groups is not None:
            if isinstance(rows, Fp8Matrix):
                return self._encode_f8(rows, self.groups)
            found = self._encode_grouped(rows, self.groups)
        if found is not None:
            return found
        with np.errstate(all="ignore"):  # what is not finite is found by encode
            return encode(self.format, self.columns.take(rows.dequantize()))

    def _encode_f8(self, rows: Fp8Matrix, groups: Gather) -> EncodedRows:
        if ((rows.codes & _F8_NAN) == _F8_NAN).any():
            raise UnfitWeights("holds NaN")
        scales = _with_row_scales(rows).scales
        return EncodedRows(self.columns.take(rows.codes)[:, None], groups.take(scales))

    def _encode_grouped(self, rows: GroupedMatrix, groups: Gather) -> EncodedRows | None:
        """None where int8 does not hold the codes."""
        scales, zeros = groups.take(rows.scales), groups.take(rows.zeros)
        if groups.padding is not None:
            zeros[:, groups.padding] = 1 << (rows.bits - 1)
        codes = self.columns.take(rows.codes).reshape(*scales.shape, -1)
        if self.columns.padding is not None:
            padding = self.columns.padding.reshape(codes.shape[1:])
            np.copyto(codes, np.minimum(zeros, 15).astype(np.uint8)[..., None], where=padding)
        halves, rounded = to_half(scales)
        if self.format in ("q8", "q8c"):
            signed = _around_zero(rows.bits, codes, zeros)
            if signed is None:
                return None
            words = byte_words(signed)
            return EncodedRows(words, scales) if self.format == "q8c" else EncodedRows(words, halves, rounded=rounded)
        if has_zero(self.format):
            return EncodedRows(nibble_words(codes), halves, zeros=zeros.astype(np.int8), rounded=rounded)
        return EncodedRows(nibble_words(_around_eight(rows.bits, codes, zeros)), halves, rounded=rounded)


def _group_size(format_: str, stored: QuantizedFormat, k: int) -> int | None:
    """Columns that share a scale in a format that may hold the numbers as they are stored; None for other formats."""
    if isinstance(stored, Fp8Format):
        return F8_BLOCK if format_ == "f8" else None
    if format_ == "q8c":
        return k
    holds_nibbles = format_.startswith(("q4g", "q4z"))
    return group_size(format_) if format_ == "q8" or (holds_nibbles and stored.bits <= 4) else None


def _column_groups(rows: QuantizedMatrix) -> Int32:
    """The number of each column's scale [K]."""
    if isinstance(rows, GroupedMatrix):
        return rows.column_groups()
    width = rows.shape[1]
    return np.arange(width, dtype=np.int32) // np.int32(min(rows.block[1], width))


def _around_zero(bits: int, codes: UInt8, zeros: Int16) -> NDArray[np.int8] | None:
    """Codes [n, groups, size] less their zero points [n, groups]; None where int8 does not hold them."""
    if zeros.max() > 128 or (1 << bits) - 1 - zeros.min() > 127:
        return None
    moved: NDArray[np.int8] = (codes - zeros.astype(np.uint8)[..., None]).view(np.int8)  # modulo 256
    return moved


def _around_eight(bits: int, codes: UInt8, zeros: Int16) -> UInt8:
    """Codes [n, groups, size] moved so that their zero points [n, groups] become 8."""
    if (zeros == 8).all():
        return codes
    moves = 8 - zeros
    if moves.min() < 0 or moves.max() > 16 - (1 << bits):
        raise UnfitWeights("has zero points other than its format says")
    return codes + moves.astype(np.uint8)[..., None]


def _in_places(groups: Int32, source: Int32) -> Int32:
    """The group of each place, -1 for padding."""
    return np.where(source < 0, np.int32(-1), groups[source])


def _with_row_scales(rows: Fp8Matrix) -> Fp8Matrix:
    """The same with scales [N, ...]."""
    return Fp8Matrix(rows.codes, rows.scales[np.arange(len(rows.codes)) // rows.block[0]], (1, rows.block[1]))


def _joined(parts: Sequence[QuantizedMatrix]) -> QuantizedMatrix:
    """Rows of one matrix below each other, with scales [N, ...]."""
    codes = np.concatenate([part.codes for part in parts])
    scales = np.concatenate(
        [(_with_row_scales(part) if isinstance(part, Fp8Matrix) else part).scales for part in parts]
    )
    first = parts[0]
    if isinstance(first, Fp8Matrix):
        return Fp8Matrix(codes, scales, (1, first.block[1]))
    zeros = np.concatenate([part.zeros for part in parts if isinstance(part, GroupedMatrix)])
    return replace(first, codes=codes, scales=scales, zeros=zeros)
