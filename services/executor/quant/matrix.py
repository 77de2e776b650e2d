"""Quantized matrices in forms that no file format shows through: what every scheme reads into and writes from.

All are [N outputs, K inputs] like plain ones. Numbers of a form are exact: fp32 holds what fp16 and bf16 scales mean.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

UInt8 = NDArray[np.uint8]
Int16 = NDArray[np.int16]
Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]
Rows = slice | NDArray[np.integer]

FP8_MAX = 448.0
"""The largest number of e4m3fn, which has no infinities."""


@dataclass(frozen=True, slots=True)
class GroupedFormat:
    """What is known of a grouped matrix without its numbers."""

    bits: int
    group_size: int  # columns; of one scale a row, the width
    is_symmetric: bool  # all zero points are 2 ** (bits - 1)
    is_ordered: bool = False  # columns name their groups (act-order); otherwise groups are neighbours

    def __str__(self) -> str:
        order = ", any order" if self.is_ordered else ""
        return f"{'int' if self.is_symmetric else 'uint'}{self.bits} in groups of {self.group_size}{order}"


@dataclass(frozen=True, slots=True)
class Fp8Format:
    """What is known of an e4m3 matrix without its numbers."""

    block: tuple[int, int]  # rows and columns that share a scale

    def __str__(self) -> str:
        return f"e4m3 in blocks of {self.block[0]}x{self.block[1]}"


@dataclass(frozen=True, slots=True)
class GroupedMatrix:
    """Integers in groups of columns: value = (code - zero of the group) * scale of the group.

    The last group may be short. ValueError where the parts do not fit each other.
    """

    bits: int
    codes: UInt8  # [N, K], below 2 ** bits
    scales: Float32  # [N, G]
    zeros: Int16  # [N, G]
    group_size: int  # columns of a group where group_index is None
    group_index: Int32 | None = None  # [K]: the group of each column (act-order)

    def __post_init__(self) -> None:
        rows, columns = self.codes.shape
        if self.scales.shape != self.zeros.shape or len(self.scales) != rows:
            raise ValueError(f"scales {self.scales.shape} and zeros {self.zeros.shape} for {rows} rows")
        groups = self.scales.shape[1]
        if self.group_index is None:
            if self.group_size < 1 or groups != -(-columns // self.group_size):
                raise ValueError(f"{groups} groups of {self.group_size} for {columns} columns")
        elif self.group_index.shape != (columns,) or not _all_within(self.group_index, groups):
            raise ValueError(f"a group index {self.group_index.shape} of {groups} groups for {columns} columns")

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape

    @property
    def format(self) -> GroupedFormat:
        is_symmetric = bool((self.zeros == 1 << (self.bits - 1)).all())
        return GroupedFormat(self.bits, self.group_size, is_symmetric, self.group_index is not None)

    def dequantize(self) -> Float32:
        """All values, fp32 [N, K]. Of a large matrix, take some rows first."""
        out = self.codes.astype(np.float32)
        rows, columns = self.shape
        zeros = self.zeros.astype(np.float32)
        with np.errstate(invalid="ignore"):  # scales that are not finite: who uses the values looks for them
            if self.group_index is None and columns % self.group_size == 0:
                groups = out.reshape(rows, -1, self.group_size)
                groups -= zeros[..., None]
                groups *= self.scales[..., None]
            else:
                index = self.column_groups().astype(np.intp)
                out -= zeros.take(index, axis=1, mode="clip")  # in range, and faster so
                out *= self.scales.take(index, axis=1, mode="clip")
        return out

    def column_groups(self) -> Int32:
        """The group of each column [K]."""
        if self.group_index is not None:
            return self.group_index
        return np.arange(self.shape[1], dtype=np.int32) // np.int32(self.group_size)

    def take_rows(self, rows: Rows) -> GroupedMatrix:
        """Some outputs, as a column-parallel worker holds them."""
        return replace(self, codes=self.codes[rows], scales=self.scales[rows], zeros=self.zeros[rows])

    def take_columns(self, start: int, stop: int) -> GroupedMatrix:
        """Some inputs, as a row-parallel worker holds them. ValueError beyond the width.

        A start within a group makes groups smaller, so that each column keeps its scale.
        """
        _check_range(start, stop, self.shape[1])
        codes = self.codes[:, start:stop]
        if self.group_index is not None:
            used, index = np.unique(self.group_index[start:stop], return_inverse=True)
            return replace(
                self, codes=codes, scales=self.scales[:, used], zeros=self.zeros[:, used],
                group_index=index.astype(np.int32),
            )  # fmt: skip
        size = math.gcd(start, self.group_size)
        groups = np.arange(start // size, -(-stop // size)) * size // self.group_size
        return replace(self, codes=codes, scales=self.scales[:, groups], zeros=self.zeros[:, groups], group_size=size)


@dataclass(frozen=True, slots=True)
class Fp8Matrix:
    """e4m3fn numbers in blocks: value = number * scale of the block.

    The last blocks of rows and columns may be short. ValueError where the parts do not fit each other.
    """

    codes: UInt8  # [N, K], the numbers' bits
    scales: Float32  # [ceil(N / block rows), ceil(K / block columns)]
    block: tuple[int, int]  # (N, K) is one scale for all, (1, K) one a row

    def __post_init__(self) -> None:
        expected = tuple(-(-size // step) for size, step in zip(self.codes.shape, self.block, strict=True))
        if min(self.block) < 1 or self.scales.shape != expected:
            raise ValueError(f"scales {self.scales.shape} for {self.codes.shape} in blocks of {self.block}")

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape

    @property
    def format(self) -> Fp8Format:
        return Fp8Format(self.block)

    def dequantize(self) -> Float32:
        """All values, fp32 [N, K]. Of a large matrix, take some rows first."""
        rows, columns = self.shape
        out = fp8_values()[self.codes]
        scales = self.scales if self.block[1] >= columns else self.scales.repeat(self.block[1], axis=1)[:, :columns]
        out *= scales[np.arange(rows) // self.block[0]]
        return out

    def take_rows(self, rows: Rows) -> Fp8Matrix:
        """Some outputs, as a column-parallel worker holds them. Blocks get one row, unless there is one for all."""
        codes = self.codes[rows]
        if self.block[0] >= self.shape[0]:
            return Fp8Matrix(codes, self.scales, (max(1, len(codes)), self.block[1]))
        return Fp8Matrix(codes, self.scales[np.arange(self.shape[0])[rows] // self.block[0]], (1, self.block[1]))

    def take_columns(self, start: int, stop: int) -> Fp8Matrix:
        """Some inputs, as a row-parallel worker holds them. ValueError beyond the width.

        A start within a block makes blocks narrower, so that each column keeps its scale.
        """
        _check_range(start, stop, self.shape[1])
        size = math.gcd(start, self.block[1])
        blocks = np.arange(start // size, -(-stop // size)) * size // self.block[1]
        return Fp8Matrix(self.codes[:, start:stop], self.scales[:, blocks], (self.block[0], size))


QuantizedMatrix = GroupedMatrix | Fp8Matrix
QuantizedFormat = GroupedFormat | Fp8Format


@cache
def fp8_values() -> Float32:
    """What each of the 256 codes of e4m3fn means: 4 bits of exponent with bias 7, 3 of mantissa, 127 and 255 NaN."""
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    magnitude = np.where(exponent == 0, np.ldexp(mantissa / 8, -6), np.ldexp(1 + mantissa / 8, exponent - 7))
    magnitude[codes & 127 == 127] = np.nan
    values = np.where(codes < 128, magnitude, -magnitude).astype(np.float32)
    values.flags.writeable = False
    return values


def fp8_codes(values: Float32) -> UInt8:
    """The nearest numbers of e4m3 [...], ties to even; what lies beyond the largest becomes it, NaN stays."""
    magnitude = np.minimum(np.abs(values), np.float32(FP8_MAX))
    bits = magnitude.view(np.uint32)
    # fp32 with 20 bits of mantissa rounded away, and the bias of its exponent 120 lower.
    normal = ((bits + np.uint32(0x7FFFF) + (bits >> np.uint32(20) & np.uint32(1))) >> np.uint32(20)) - np.uint32(960)
    with np.errstate(invalid="ignore"):
        tiny = np.rint(magnitude * np.float32(512)).astype(np.uint32)  # steps of 2 ** -9 below 2 ** -6
    finite = np.where(magnitude < np.float32(2**-6), tiny, normal)
    codes: UInt8 = np.where(np.isnan(values), np.uint32(127), finite).astype(np.uint8)
    codes |= np.signbit(values).astype(np.uint8) << np.uint8(7)
    return codes


def _all_within(index: Int32, count: int) -> bool:
    return not index.size or bool(index.min() >= 0 and index.max() < count)


def _check_range(start: int, stop: int, width: int) -> None:
    if not 0 <= start < stop <= width:
        raise ValueError(f"columns {start} to {stop} of {width}")
