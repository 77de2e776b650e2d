"""Packed matrices read value by value, as format.h says where they lie, and multiplied plainly."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Int16 = NDArray[np.int16]
Float32 = NDArray[np.float32]
Index = NDArray[np.int64]


def unpack(format_: str, packed: Bytes, rows: int, k: int) -> Float32:
    """The values [rows, k] of a packed matrix; rows is a multiple of 32."""
    row, column = np.divmod(np.arange(rows * k, dtype=np.int64), k)
    panel, lane = row // 32, row % 32
    start = panel * (packed.size * 32 // rows)
    match format_:
        case "f32":
            values = _numbers(packed, start + (column * 32 + lane) * 4, np.float32)
        case "bf16":
            low = _numbers(packed, start + (column // 2 * 64 + lane * 2 + column % 2) * 2, np.uint16)
            values = (low.astype(np.uint32) << 16).view(np.float32)
        case "q8":
            group, i = np.divmod(column, 32)
            at = start + group * 1088
            quants = _numbers(packed, at + i // 4 * 128 + lane * 4 + i % 4, np.int8)
            values = quants * _numbers(packed, at + 1024 + lane * 2, np.float16).astype(np.float32)
        case "q8c":
            quants = _numbers(packed, start + column // 4 * 128 + lane * 4 + column % 4, np.int8)
            values = quants * _numbers(packed, start + k * 32 + lane * 4, np.float32)
        case "f8":
            codes = _numbers(packed, start + column * 32 + lane, np.uint8)
            values = _e4m3(codes) * _numbers(packed, start + k * 32 + column // 128 * 128 + lane * 4, np.float32)
        case "q4k":
            values = _q4k(packed, start, lane, column)
        case "q6k":
            values = _q6k(packed, start, lane, column)
        case _:
            values = _four_bits(format_, packed, start, lane, column)
    return values.reshape(rows, k)


def _four_bits(format_: str, packed: Bytes, start: Index, lane: Index, column: Index) -> Float32:
    parsed = re.fullmatch(r"q4([mz]?)g(\d+)", format_)
    if parsed is None:
        raise ValueError(f"no format {format_}")
    size = int(parsed[2])
    group, i = np.divmod(column, size)
    at = start + group * (size * 16 + {"": 64, "m": 128, "z": 96}[parsed[1]])
    part, j = np.divmod(i, 32)
    pair = _numbers(packed, at + part * 512 + j % 16 // 4 * 128 + lane * 4 + j % 4, np.uint8)
    quants = np.where(j < 16, pair & 15, pair >> 4).astype(np.float32)
    d = _numbers(packed, at + size * 16 + lane * 2, np.float16).astype(np.float32)
    if not parsed[1]:
        return d * (quants - 8)
    if parsed[1] == "z":
        quants = quants - _numbers(packed, at + size * 16 + 64 + lane, np.int8).astype(np.float32)
        return d * quants
    return d * quants + _numbers(packed, at + size * 16 + 64 + lane * 2, np.float16).astype(np.float32)


def _e4m3(codes: Bytes) -> Float32:
    exponent, mantissa = codes >> 3 & 15, (codes & 7).astype(np.float32)
    magnitude = np.where(exponent == 0, mantissa / 8, 1 + mantissa / 8) * np.exp2(
        np.maximum(exponent, 1) - np.float32(7)
    )
    values: Float32 = np.where(codes < 128, magnitude, -magnitude).astype(np.float32)
    return values


def _q4k(packed: Bytes, start: Index, lane: Index, column: Index) -> Float32:
    group, i = np.divmod(column, 256)
    at, (part, j) = start + group * 4736, np.divmod(i, 32)
    pair = _numbers(packed, at + 640 + part * 512 + j % 16 // 4 * 128 + lane * 4 + j % 4, np.uint8)
    quants = np.where(j < 16, pair & 15, pair >> 4).astype(np.float32)
    d, m = (_numbers(packed, at + begin + lane * 2, np.float16).astype(np.float32) for begin in (0, 64))
    steps, lows = (_numbers(packed, at + begin + part * 32 + lane, np.uint8) for begin in (128, 384))
    values: Float32 = d * steps * quants + m * lows
    return values


def _q6k(packed: Bytes, start: Index, lane: Index, column: Index) -> Float32:
    group, i = np.divmod(column, 256)
    at, (part, j) = start + group * 6720, np.divmod(i, 16)
    quad, odd = j // 4, j % 2
    first, second, third = (
        _numbers(packed, at + 576 + part * 384 + word * 128 + lane * 4 + j % 4 // 2 * 2, np.uint16) for word in range(3)
    )
    whole = np.choose(np.minimum(quad, 2), (first, second, third)) >> np.where(odd, 4, 10)
    split = np.where(odd, second, first) << 2 | third >> 2 * odd & 3
    quants = (np.where(quad < 3, whole, split & 63).astype(np.int64) & 63 ^ 32) - 32
    d = _numbers(packed, at + lane * 2, np.float16).astype(np.float32)
    values: Float32 = d * _numbers(packed, at + 64 + part * 32 + lane, np.int8) * quants.astype(np.float32)
    return values


def quantize_activations(x: Float32, most_quant: int = 127) -> tuple[Int16, Float32]:
    """Integers [T, k] and scales [T, k / 32] of rows [T, k]: per 32 values max |x| / most_quant, ties to even.

    `most_quant` is 127 for int8 and 32767 for int16.
    """
    groups = x.reshape(len(x), -1, 32)
    most = np.abs(groups).max(axis=2)
    inverse = np.float32(most_quant) / np.where(most > 0, most, np.float32(np.inf))
    quants = np.rint(groups * inverse[..., None]).astype(np.int16)
    return quants.reshape(x.shape), most * np.float32(1 / most_quant)


def matmul(format_: str, packed: Bytes, rows: int, x: Float32) -> Float32:
    """x [T, k] times the transposed matrix [rows, k], summed in float64.

    q8 and q6k take x as int16, q8c and the 4-bit formats as int8.
    """
    inputs = x.astype(np.float64)
    if format_ not in ("f32", "bf16", "f8"):
        quants, scales = quantize_activations(x, 32767 if format_ in ("q8", "q6k") else 127)
        inputs = np.repeat(scales, 32, axis=1).astype(np.float64) * quants
    weights = unpack(format_, packed, rows, x.shape[1]).astype(np.float64)
    return np.asarray(inputs @ weights.T, np.float32)


def _numbers(packed: Bytes, at: Index, dtype: Any) -> NDArray[Any]:
    """The numbers of a type that begin at these bytes."""
    width = np.dtype(dtype).itemsize
    found: NDArray[Any] = packed[at[:, None] + np.arange(width)].view(dtype)[:, 0]
    return found
