"""fp32 rows to packed words, rounded to nearest."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from services.executor.backends.cpu.formats import group_size, has_minimum
from services.executor.backends.cpu.panels import EncodedRows, UInt32, UnfitWeights

Float16 = NDArray[np.float16]
Float32 = NDArray[np.float32]
UInt16 = NDArray[np.uint16]
UInt8 = NDArray[np.uint8]


def encode(format_: str, values: Float32) -> EncodedRows:
    """Rows [n, k] in a packed format, k a multiple of 32 and of the group. Raises UnfitWeights."""
    if not np.isfinite(values).all():
        raise UnfitWeights("holds NaN or infinity")
    # Scales that fp16 cannot hold become infinite, and are refused by EncodedRows.
    with np.errstate(over="ignore", under="ignore"):
        match format_:
            case "f32":
                return EncodedRows(values.view(np.uint32)[:, None])
            case "bf16":
                return encode_bf16(round_to_bf16(values))
            case "q8":
                return _q8(values.reshape(len(values), -1, 32))
            case "q8c":
                return _q8c(values)
        groups = values.reshape(len(values), -1, group_size(format_))
        return _q4_minimum(groups) if has_minimum(format_) else _q4(groups)


def encode_bf16(bits: UInt16) -> EncodedRows:
    """Rows [n, k] of bf16 bits. Raises UnfitWeights."""
    if ((bits & 0x7F80) == 0x7F80).any():
        raise UnfitWeights("holds NaN or infinity as bf16")
    return EncodedRows(np.ascontiguousarray(bits).view(np.uint32)[:, None])


def round_to_bf16(values: Float32) -> UInt16:
    """The bits of the nearest bf16, ties to even; finite values only."""
    bits = values.view(np.uint32)
    return ((bits + ((bits >> 16 & 1) + np.uint32(0x7FFF))) >> 16).astype(np.uint16)


def nibble_words(quants: UInt8) -> UInt32:
    """4-bit values [n, groups, size] as words [n, groups, size / 8]: of 32 values, i beside i + 16."""
    halves = quants.reshape(*quants.shape[:2], -1, 2, 16)
    return byte_words(halves[..., 0, :] | halves[..., 1, :] << 4)


def byte_words(values: NDArray[np.uint8 | np.int8]) -> UInt32:
    """Bytes [n, groups, ...] as words [n, groups, bytes / 4]."""
    n, groups = values.shape[:2]
    return np.ascontiguousarray(values).reshape(n, groups, -1).view(np.uint32)


def _q8(groups: Float32) -> EncodedRows:
    peaks = np.abs(groups).max(axis=2)
    scales = (peaks / 127).astype(np.float16)
    # A tiny scale may have been rounded down so far that its group no longer fits.
    scales = np.where(peaks > scales * np.float32(127.5), np.nextafter(scales, np.float16(np.inf)), scales)
    return EncodedRows(byte_words(_steps(groups, scales, 127)), scales)


def _q8c(rows: Float32) -> EncodedRows:
    scales = np.abs(rows).max(axis=1, keepdims=True) / np.float32(127)
    return EncodedRows(byte_words(_steps(rows[:, None], scales, 127)), scales)


def _q4(groups: Float32) -> EncodedRows:
    """d * (q - 8): the value farthest from 0 becomes -8, the longer end of the range."""
    low, high = groups.min(axis=2), groups.max(axis=2)
    scales = (np.where(-low > high, low, high) / -8).astype(np.float16)
    return EncodedRows(nibble_words((_steps(groups, scales, 8).clip(-8, 7) + np.int8(8)).view(np.uint8)), scales)


def _q4_minimum(groups: Float32) -> EncodedRows:
    low = groups.min(axis=2)
    minima = low.astype(np.float16)
    scales = ((groups.max(axis=2) - low) / 15).astype(np.float16)
    quants = _steps(groups - minima[..., None].astype(np.float32), scales, 15).clip(0, 15)
    return EncodedRows(nibble_words(quants.view(np.uint8)), scales, minima)


def _steps(groups: Float32, scales: NDArray[np.float16] | Float32, most: int) -> NDArray[np.int8]:
    """Values [n, groups, size] in steps of their group's scale, at most `most` either way."""
    steps = np.where(scales == 0, np.float32(1), scales.astype(np.float32))
    return np.rint(groups / steps[..., None]).clip(-most, most).astype(np.int8)
