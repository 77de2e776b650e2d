"""Small integers without gaps in 32-bit words: value i of a row lies at its bits i * width on, low bits first.

Widths are 1 to 4, and 8. Bytes are cut into halves, and these again. Of 3 bits, eight values at a time: fields that are
spread over 64 bits, one a byte, are drawn together in pairs, pairs of pairs and halves, and the other way round.
"""

from __future__ import annotations

from functools import cache

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
    padded = np.zeros((*lead, -(-count // 32) * 32), np.uint8)
    padded[..., :count] = values
    eights = padded.view("<u8")
    for fields in (1, 2, 4):
        eights |= eights >> np.uint64(fields * (8 - bits))
        eights &= _mask(bits, fields * 2)
    data = np.ascontiguousarray(padded.reshape(*lead, -1, 8)[..., :bits])
    return data.reshape(*lead, -1).view("<u4")[..., : word_count(count, bits)]


def unpack_bits(words: UInt32, bits: int, count: int) -> UInt8:
    """The first `count` values [..., count] of words [..., at least as many as they take]."""
    *lead, size = words.shape
    data = np.ascontiguousarray(words, "<u4").view(np.uint8)
    if 8 % bits == 0:
        return _halve(data, bits)[..., :count]
    whole, rest = divmod(size * 4, bits)
    out = np.zeros((*lead, whole + (rest > 0), 8), np.uint8)
    out[..., :whole, :bits] = data[..., : whole * bits].reshape(*lead, whole, bits)
    if rest:
        out[..., whole, :rest] = data[..., whole * bits :]
    eights = out.reshape(*lead, -1).view("<u8")
    for fields in (4, 2, 1):
        eights |= eights << np.uint64(fields * (8 - bits))
        eights &= _mask(bits, fields)
    return eights.view(np.uint8)[..., :count]


def unpack_window(words: UInt32, bits: int, start: int, stop: int) -> UInt8:
    """Values start..stop of each row; only the words that hold them are read."""
    first = start // 32  # of 32 values, which fill whole words
    window = words[..., first * bits : word_count(stop, bits)]
    return unpack_bits(window, bits, stop - first * 32)[..., start % 32 :]


def _halve(data: UInt8, bits: int) -> UInt8:
    """Bytes [..., n], cut into halves until each has this many bits."""
    width = 8
    while width > bits:
        width //= 2
        pairs = data.astype("<u2")
        pairs |= pairs << np.uint16(8 - width)
        pairs &= np.uint16(((1 << width) - 1) * 0x0101)
        data = pairs.view(np.uint8)
    return data


@cache
def _mask(bits: int, fields: int) -> np.uint64:
    """The low fields * bits of each fields * 8 bits."""
    ones = (1 << fields * bits) - 1
    return np.uint64(sum(ones << at for at in range(0, 64, fields * 8)))
