"""Stored tensors to fp32, in pieces that stay in cache."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from services.executor.models.weights import Bytes, QuantizedTensor, Tensor, load_failed

Float32 = NDArray[np.float32]
_PIECE_VALUES = 1 << 16
_PIECE_ROWS = 128  # of quantized matrices, whose rows may lie beside each other in one word


def to_float32(tensor: Tensor) -> Float32:
    """The whole tensor as fp32."""
    out = np.empty((math.prod(tensor.shape[:-1]), tensor.shape[-1]), np.float32)
    for start, piece in pieces(tensor):
        out[start : start + len(piece)] = piece
    return out.reshape(tensor.shape)


def pieces(tensor: Tensor) -> Iterator[tuple[int, Float32]]:
    """Groups of rows as fp32 [rows, columns], each with its first row's index; a vector is one row."""
    rows, columns = math.prod(tensor.shape[:-1]), tensor.shape[-1]
    if isinstance(tensor, QuantizedTensor):
        step = max(1, _PIECE_VALUES // (columns * _PIECE_ROWS)) * _PIECE_ROWS
        for start in range(0, rows, step):
            yield start, tensor.read(start, min(start + step, rows)).dequantize()
        return
    step = max(1, _PIECE_VALUES // columns)
    for start in range(0, rows, step):
        data = np.ascontiguousarray(tensor.data[start : start + step])
        yield start, _float32(tensor.format, data).reshape(len(data), columns)


def _float32(format_: str, data: Bytes) -> Float32:
    match format_:
        case "F32":
            return data.view(np.float32)
        case "F16":
            return data.view(np.float16).astype(np.float32)
        case "BF16":
            return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        case "Q4_0":
            return _q4_0(data.reshape(-1, 18))
        case "Q4_1":
            return _q4_1(data.reshape(-1, 20))
    # Imported where it is needed: it takes a while, and most files need none of it.
    try:
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize
    except ImportError as error:
        raise load_failed(f"weights in {format_} need the package gguf: pip install gguf") from error

    return np.asarray(dequantize(data.reshape(-1), GGMLQuantizationType[format_]), np.float32)


# The two most used formats, at twice the speed of gguf.quants and with the same bits.


def _q4_0(blocks: Bytes) -> Float32:
    scale = np.ascontiguousarray(blocks[:, :2]).view(np.float16).astype(np.float32)
    out = np.empty((len(blocks), 2, 16), np.float32)
    np.multiply((blocks[:, 2:] & 15).view(np.int8) - np.int8(8), scale, out=out[:, 0])
    np.multiply((blocks[:, 2:] >> 4).view(np.int8) - np.int8(8), scale, out=out[:, 1])
    return out


def _q4_1(blocks: Bytes) -> Float32:
    scale, low = np.split(np.ascontiguousarray(blocks[:, :4]).view(np.float16).astype(np.float32), 2, axis=1)
    out = np.empty((len(blocks), 2, 16), np.float32)
    np.multiply(blocks[:, 4:] & 15, scale, out=out[:, 0])
    np.multiply(blocks[:, 4:] >> 4, scale, out=out[:, 1])
    out += low[:, :, None]
    return out
