"""fp32 rows to packed words, rounded to nearest."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from services.executor.backends.cpu.formats import F8_BLOCK, group_size, has_minimum, has_zero
from services.executor.backends.cpu.panels import EncodedRows, UInt32, UnfitWeights
from services.executor.quant.matrix import FP8_MAX, fp8_codes

Float16 = NDArray[np.float16]
Float32 = NDArray[np.float32]
UInt16 = NDArray[np.uint16]
UInt8 = NDArray[np.uint8]


def encode(format_: str, values: Float32) -> EncodedRows:
    """Rows [n, k] in a packed format, k a multiple of 32 and of the group. Raises UnfitWeights."""
    if not np.isfinite(values).all():
        raise UnfitWeights("holds NaN or infinity")
    # Scales that fp16 cannot hold become infinite, and are refused by EncodedRows.
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        match format_:
            case "f32":
                return EncodedRows(values.view(np.uint32)[:, None])
            case "bf16":
                return encode_bf16(round_to_bf16(values))
            case "q8":
                return _q8(values.reshape(len(values), -1, 32))
            case "q8c":
                return _q8c(values)
            case "f8":
                return _f8(values)
            case "q4k":
                return _q4k(values.reshape(len(values), -1, 8, 32))
            case "q6k":
                return _q6k(values.reshape(len(values), -1, 16, 16))
        groups = values.reshape(len(values), -1, group_size(format_))
        if has_zero(format_):
            return _q4_zero(groups)
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
    eights = np.ascontiguousarray(quants).reshape(-1, 32).view(np.uint64)  # no shift leaves its byte
    pairs = np.empty((len(eights), 2), np.uint64)
    for i in range(2):
        np.bitwise_or(eights[:, i], eights[:, i + 2] << np.uint64(4), out=pairs[:, i])
    return pairs.view(np.uint32).reshape(*quants.shape[:2], -1)


def six_bit_words(quants: UInt8) -> UInt32:
    """Values [n, groups, size], of which the low six bits count, as words [n, groups, size * 3 / 16]."""
    quads = (quants & 63).astype(np.uint16).reshape(*quants.shape[:2], -1, 4, 2, 2)
    first, second = quads[..., 0], quads[..., 1]
    words = first[..., :3, :] << 10 | second[..., :3, :] << 4
    words[..., 0, :] |= first[..., 3, :] >> 2
    words[..., 1, :] |= second[..., 3, :] >> 2
    words[..., 2, :] |= first[..., 3, :] & 3 | (second[..., 3, :] & 3) << 2
    return words.reshape(*quants.shape[:2], -1).view(np.uint32)


def byte_words(values: NDArray[np.uint8 | np.int8]) -> UInt32:
    """Bytes [n, groups, ...] as words [n, groups, bytes / 4]."""
    n, groups = values.shape[:2]
    return np.ascontiguousarray(values).reshape(n, groups, -1).view(np.uint32)


def to_half(scales: Float32) -> tuple[Float16, int]:
    """Scales as fp16, and how many of them it does not hold exactly."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        halves = scales.astype(np.float16)
    return halves, int((halves != scales).sum())


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


def _q4_zero(groups: Float32) -> EncodedRows:
    low, high = np.minimum(groups.min(axis=2), 0), np.maximum(groups.max(axis=2), 0)
    scales = ((high - low) / 15).astype(np.float16)
    zeros = -_steps(low[..., None], scales, 15)[..., 0]
    quants = (_steps(groups, scales, 15) + zeros[..., None]).clip(0, 15)
    return EncodedRows(nibble_words(quants.view(np.uint8)), scales, zeros=zeros)


def _f8(rows: Float32) -> EncodedRows:
    n, k = rows.shape
    blocks = np.pad(rows, ((0, 0), (0, -k % F8_BLOCK))).reshape(n, -1, F8_BLOCK)
    scales = np.abs(blocks).max(axis=2) / np.float32(FP8_MAX)
    divisors: Float32 = np.where(scales == 0, np.float32(1), scales)
    codes = fp8_codes(np.divide(blocks, divisors[..., None], dtype=np.float32))
    return EncodedRows(codes.reshape(n, 1, -1)[..., :k], scales)


def _q4k(parts: Float32) -> EncodedRows:
    n = len(parts)
    low = np.minimum(parts.min(axis=3), 0)
    scales, steps = _small_scales((parts.max(axis=3) - low) / 15, 63)
    minima, low_steps = _small_scales(low, 63)
    above = parts - (minima[..., None].astype(np.float32) * low_steps)[..., None]
    quants = _steps(above.reshape(n, -1, 32), (scales[..., None].astype(np.float32) * steps).reshape(n, -1), 15)
    words = nibble_words(quants.clip(0, 15).view(np.uint8).reshape(n, -1, 256))
    return EncodedRows(words, scales, minima, np.concatenate((steps, low_steps), axis=2))


def _q6k(parts: Float32) -> EncodedRows:
    n = len(parts)
    scales, steps = _small_scales(np.abs(parts).max(axis=3) / 31, 127)
    quants = _steps(parts.reshape(n, -1, 16), (scales[..., None].astype(np.float32) * steps).reshape(n, -1), 31)
    return EncodedRows(six_bit_words(quants.view(np.uint8).reshape(n, -1, 256)), scales, steps=steps)


def _small_scales(values: Float32, most: int) -> tuple[Float16, UInt8]:
    """Values [n, groups, parts], all of one sign, as units [n, groups] times whole numbers up to `most`."""
    extremes = np.where(values.min(axis=2) < 0, values.min(axis=2), values.max(axis=2))
    units = (extremes / most).astype(np.float16)
    divisors = np.where(units == 0, np.float32(1), units.astype(np.float32))
    return units, np.rint(values / divisors[..., None]).clip(0, most).astype(np.uint8)


def _steps(groups: Float32, scales: NDArray[np.float16] | Float32, most: int) -> NDArray[np.int8]:
    """Values [n, groups, size] in steps of their group's scale, at most `most` either way."""
    steps = np.where(scales == 0, np.float32(1), scales.astype(np.float32))
    return np.rint(groups / steps[..., None]).clip(-most, most).astype(np.int8)
