"""ggml's quantized blocks to packed words without a detour over fp32.

Exact, but for Q4_K in a format that is not its own, where products of scales are rounded to fp16.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from services.executor.backends.cpu.panels import EncodedRows, Steps, UInt32
from services.executor.backends.cpu.quantize import byte_words, nibble_words, six_bit_words
from services.executor.models.weights import Bytes

Float16 = NDArray[np.float16]

Repacker = Callable[[Bytes], EncodedRows]
"""From rows [n, bytes of a row]; raises UnfitWeights."""


def _q4_0(rows: Bytes) -> EncodedRows:
    blocks = _blocks(rows, 18)
    # The block's own order of nibbles is that of a group.
    return EncodedRows(byte_words(blocks[..., 2:]), _half(blocks, 0))


def _q4_0_with_minimum(rows: Bytes) -> EncodedRows:
    """d * (q - 8) as d * q + m: -8 d is exact in fp16, or infinite and refused."""
    found = _q4_0(rows)
    assert found.scales is not None
    with np.errstate(over="ignore"):
        return EncodedRows(found.words, found.scales, found.scales * np.float16(-8))


def _q4_0_as_bytes(rows: Bytes) -> EncodedRows:
    blocks = _blocks(rows, 18)
    return EncodedRows(byte_words(_nibbles(blocks[..., 2:]).view(np.int8) - np.int8(8)), _half(blocks, 0))


def _q4_1(rows: Bytes) -> EncodedRows:
    blocks = _blocks(rows, 20)
    return EncodedRows(byte_words(blocks[..., 4:]), _half(blocks, 0), _half(blocks, 2))


def _q5_0(rows: Bytes) -> EncodedRows:
    blocks = _blocks(rows, 22)
    fifth = np.unpackbits(blocks[..., 2:6], axis=2, bitorder="little")
    return EncodedRows(
        byte_words((_nibbles(blocks[..., 6:]) | fifth << 4).view(np.int8) - np.int8(16)), _half(blocks, 0)
    )


def _q8_0(rows: Bytes) -> EncodedRows:
    blocks = _blocks(rows, 34)
    return EncodedRows(byte_words(blocks[..., 2:]), _half(blocks, 0))


def _q4_k_blocks(rows: Bytes) -> tuple[UInt32, Float16, Float16, Steps]:
    """Blocks of 256: eight groups of 32 with 6-bit scales and minima under one fp16 scale each."""
    blocks = _blocks(rows, 144)
    n = len(rows)
    packed = blocks[..., 4:16].reshape(n, -1, 3, 4)  # scales, minima, the low bits of the last four of both
    scales, minima, rest = packed[:, :, 0], packed[:, :, 1], packed[:, :, 2]
    steps = np.concatenate(
        (scales & 63, rest & 15 | (scales >> 6) << 4, minima & 63, rest >> 4 | (minima >> 6) << 4), axis=2
    )
    pairs = blocks[..., 16:].reshape(n, -1, 4, 32)  # the low nibbles are one group, the high ones the next
    quants = np.stack((pairs & 15, pairs >> 4), axis=3)
    return nibble_words(quants.reshape(n, -1, 256)), _half(blocks, 0), -_half(blocks, 2), steps


def _q4_k(rows: Bytes) -> EncodedRows:
    return EncodedRows(*_q4_k_blocks(rows))


def _q4_k_in_groups_of_32(rows: Bytes) -> EncodedRows:
    words, scales, minima, steps = _q4_k_blocks(rows)
    n = len(rows)
    with np.errstate(over="ignore", invalid="ignore"):
        d = (scales.astype(np.float32)[..., None] * steps[..., :8]).astype(np.float16)
        m = (minima.astype(np.float32)[..., None] * steps[..., 8:]).astype(np.float16)
    return EncodedRows(words.reshape(n, -1, 4), d.reshape(n, -1), m.reshape(n, -1))


def _q6_k(rows: Bytes) -> EncodedRows:
    """Blocks of 256: sixteen groups of 16 with int8 scales under one fp16 scale."""
    blocks = _blocks(rows, 210)
    n = len(rows)
    pairs = blocks[..., :128].reshape(n, -1, 2, 1, 64)  # the low nibbles are 64 values, the high ones the next 64
    low = np.concatenate((pairs & 15, pairs >> 4), axis=3).reshape(n, -1, 2, 4, 32)
    high = blocks[..., 128:192].reshape(n, -1, 2, 1, 32) >> np.array([[0], [2], [4], [6]], np.uint8)
    quants = (low | (high & 3) << 4) - np.uint8(32)
    steps = blocks[..., 192:208].view(np.int8)
    return EncodedRows(six_bit_words(quants.reshape(n, -1, 256)), _half(blocks, 208), steps=steps)


REPACKERS: Mapping[tuple[str, str], Repacker] = {
    ("Q4_0", "q4g32"): _q4_0,
    ("Q4_0", "q4mg32"): _q4_0_with_minimum,
    ("Q4_0", "q8"): _q4_0_as_bytes,
    ("Q4_1", "q4mg32"): _q4_1,
    ("Q5_0", "q8"): _q5_0,
    ("Q8_0", "q8"): _q8_0,
    ("Q4_K", "q4k"): _q4_k,
    ("Q4_K", "q4mg32"): _q4_k_in_groups_of_32,
    ("Q6_K", "q6k"): _q6_k,
}
"""By stored and packed format."""


def _blocks(rows: Bytes, size: int) -> Bytes:
    return rows.reshape(len(rows), -1, size)


def _half(blocks: Bytes, at: int) -> Float16:
    """The fp16 number at a byte of each block [n, blocks, bytes]."""
    return np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)[..., 0]


def _nibbles(pairs: Bytes) -> Bytes:
    """Bytes [..., 16] as 32 values: the low nibbles, then the high ones."""
    return np.concatenate((pairs & 15, pairs >> 4), axis=-1)
