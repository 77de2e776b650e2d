"""Small integers without gaps in 32-bit words: value i of a row lies at its bits i * width on, low bits first."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from services.executor.quant.matrix import UInt8

UInt32 = NDArray[np.uint32]


def word_count(values: int, bits: int) -> int:
    """Words that hold a row; the last may have room."""
    return -(-values * bits // 32)


def pack_bits(values: UInt8, bits: int) -> UInt32:
    """[..., n] below 2 ** bits to [..., words]; unused bits are 0. Values may cross the end of a word."""
    *lead, count = values.shape
    step, size = _period(bits)
    padded = np.zeros((*lead, -(-count // 32) * 32), np.uint8)
    padded[..., :count] = values
    groups = padded.reshape(*lead, -1, step)
    out = np.zeros((*groups.shape[:-1], size), np.uint8)
    for i in range(step):
        byte, shift = divmod(i * bits, 8)
        out[..., byte] |= groups[..., i] << shift
        if shift + bits > 8:
            out[..., byte + 1] |= groups[..., i] >> (8 - shift)
    return out.reshape(*lead, -1).view("<u4")[..., : word_count(count, bits)]


def unpack_bits(words: UInt32, bits: int, count: int) -> UInt8:
    """The first `count` values [..., count] of words [..., at least as many as they take]."""
    *lead, words_per_row = words.shape
    step, size = _period(bits)
    data = np.ascontiguousarray(words, "<u4").view(np.uint8)
    if words_per_row * 4 % size:
        data = np.concatenate((data, np.zeros((*lead, size - words_per_row * 4 % size), np.uint8)), axis=-1)
    groups = data.reshape(*lead, -1, size)
    out = np.empty((*groups.shape[:-1], step), np.uint8)
    mask = np.uint8((1 << bits) - 1)
    for i in range(step):
        byte, shift = divmod(i * bits, 8)
        value = groups[..., byte] >> shift
        if shift + bits > 8:
            value |= groups[..., byte + 1] << (8 - shift)
        np.bitwise_and(value, mask, out=out[..., i])
    return out.reshape(*lead, -1)[..., :count]


def unpack_window(words: UInt32, bits: int, start: int, stop: int) -> UInt8:
    """Values start..stop of each row; only the words that hold them are read."""
    first = start // 32  # of 32 values, which fill whole words
    window = words[..., first * bits : word_count(stop, bits)]
    return unpack_bits(window, bits, stop - first * 32)[..., start % 32 :]


def _period(bits: int) -> tuple[int, int]:
    """After how many values, and bytes, a value begins with a byte again."""
    shared = math.gcd(bits, 8)
    return 8 // shared, bits // shared
