"""4-bit matrices of any file as codes, scales and offsets of groups: value = code * scale + offset."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.executor.models.weights import Bytes, StoredTensor, Tensor
from services.executor.quant.matrix import Float32, GroupedFormat, GroupedMatrix, UInt8

_CHUNK = 32
"""Columns: kernels read groups of a multiple, or a whole row."""


@dataclass(frozen=True, slots=True)
class Int4Parts:
    """A matrix [N, K]."""

    codes: UInt8  # [N, K] below 16, columns sorted by group
    scales: Float32  # [N, G]
    offsets: Float32 | None  # [N, G]; None: -8 * scale
    group_size: int
    order: NDArray[np.int64] | None = None  # [K]: the input of each column; None: its own


def int4_parts(tensor: Tensor) -> Int4Parts | None:
    """None where it is no 4-bit matrix, or one in groups that kernels do not read."""
    if isinstance(tensor, StoredTensor):
        read = _GGML.get(tensor.format)
        return None if read is None else read(tensor.data)
    if not isinstance(tensor.format, GroupedFormat) or tensor.format.bits != 4:
        return None
    matrix = tensor.read(0, tensor.shape[0])
    return _grouped(matrix) if isinstance(matrix, GroupedMatrix) else None


def stacked(parts: Sequence[Int4Parts]) -> Int4Parts | None:
    """Below each other; None where groups or orders differ."""
    first = parts[0]
    for part in parts[1:]:
        if part.group_size != first.group_size or (part.order is None) != (first.order is None):
            return None
        if part.order is not None and first.order is not None and not np.array_equal(part.order, first.order):
            return None
    offsets = None
    if any(part.offsets is not None for part in parts):
        offsets = np.concatenate([_offsets(part) for part in parts])
    return Int4Parts(
        np.concatenate([part.codes for part in parts]),
        np.concatenate([part.scales for part in parts]),
        offsets,
        first.group_size,
        first.order,
    )


def _offsets(part: Int4Parts) -> Float32:
    return part.offsets if part.offsets is not None else part.scales * np.float32(-8)


def _grouped(matrix: GroupedMatrix) -> Int4Parts | None:
    columns = matrix.shape[1]
    if matrix.group_size % _CHUNK and matrix.group_size < columns:
        return None
    codes, order = matrix.codes, None
    if matrix.group_index is not None:
        order = np.argsort(matrix.group_index, kind="stable").astype(np.int64)
        if not np.array_equal(matrix.group_index[order], np.arange(columns) // matrix.group_size):
            return None
        codes = codes[:, order]
    offsets = None
    if not matrix.format.is_symmetric:
        with np.errstate(invalid="ignore"):  # who uses the scales looks whether they are finite
            offsets = -matrix.zeros.astype(np.float32) * matrix.scales
    return Int4Parts(codes, matrix.scales, offsets, matrix.group_size, order)


def _q4_0(rows: Bytes) -> Int4Parts:
    blocks = _blocks(rows, 18)
    return Int4Parts(_nibbles(blocks[..., 2:]), _half(blocks, 0), None, 32)


def _q4_1(rows: Bytes) -> Int4Parts:
    blocks = _blocks(rows, 20)
    return Int4Parts(_nibbles(blocks[..., 4:]), _half(blocks, 0), _half(blocks, 2), 32)


def _q4_k(rows: Bytes) -> Int4Parts:
    """Blocks of 256 in eight groups: 6 bits of scale and minimum each, under one fp16 number for both kinds."""
    blocks = _blocks(rows, 144)
    n = len(rows)
    packed = blocks[..., 4:16].reshape(n, -1, 3, 4)
    scales, minima, rest = packed[:, :, 0], packed[:, :, 1], packed[:, :, 2]
    steps = np.concatenate((scales & 63, rest & 15 | (scales >> 6) << 4), axis=2).astype(np.float32)
    lows = np.concatenate((minima & 63, rest >> 4 | (minima >> 6) << 4), axis=2).astype(np.float32)
    pairs = blocks[..., 16:].reshape(n, -1, 4, 32)  # low nibbles are one group, high ones the next
    codes = np.stack((pairs & 15, pairs >> 4), axis=3).reshape(n, -1)
    return Int4Parts(
        codes,
        (_half(blocks, 0)[..., None] * steps).reshape(n, -1),
        (-_half(blocks, 2)[..., None] * lows).reshape(n, -1),
        32,
    )


_GGML = {"Q4_0": _q4_0, "Q4_1": _q4_1, "Q4_K": _q4_k}


def _blocks(rows: Bytes, size: int) -> Bytes:
    return np.ascontiguousarray(rows).reshape(len(rows), -1, size)


def _half(blocks: Bytes, at: int) -> Float32:
    """The fp16 number at a byte of each block [n, blocks]."""
    return np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)[..., 0].astype(np.float32)


def _nibbles(pairs: Bytes) -> UInt8:
    """Blocks [n, blocks, 16] as codes [n, 32 * blocks]: low nibbles, then high ones."""
    codes: UInt8 = np.concatenate((pairs & 15, pairs >> 4), axis=-1).reshape(len(pairs), -1)
    return codes
