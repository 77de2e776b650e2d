"""Quantized matrices made up in memory, alone and as tensors of checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from services.executor.models.weights import QuantizedTensor
from services.executor.quant.bits import pack_bits
from services.executor.quant.matrix import Fp8Matrix, GroupedMatrix, QuantizedMatrix
from services.executor.quant.nibbles import NibbleMatrix
from tests.unit.executor.packing_fakes import MadeCheckpoint

Make = Callable[[tuple[int, int], np.random.Generator], QuantizedMatrix]


@dataclass(frozen=True)
class Grouped:
    """Random codes with moderate fp16 scales; `order` is the seed of the columns' order, None for neighbours."""

    bits: int = 4
    size: int = 64
    symmetric: bool = False
    order: int | None = None

    def __call__(self, shape: tuple[int, int], rng: np.random.Generator) -> GroupedMatrix:
        rows, columns = shape
        size = min(self.size, columns)
        groups = -(-columns // size)
        codes = rng.integers(0, 1 << self.bits, shape, np.uint8)
        scales = rng.uniform(0.005, 0.02, (rows, groups)).astype(np.float16).astype(np.float32)
        zeros = np.full((rows, groups), 1 << (self.bits - 1), np.int16)
        if not self.symmetric:
            zeros = rng.integers(0, 1 << self.bits, (rows, groups)).astype(np.int16)
        index = None
        if self.order is not None:  # some permutation of columns, cut into groups
            places = np.random.default_rng(self.order).permutation(columns)
            index = np.empty(columns, np.int32)
            index[places] = np.arange(columns) // size
        return GroupedMatrix(self.bits, codes, scales, zeros, size, index)


@dataclass(frozen=True)
class Fp8:
    """Any numbers but NaN; a side of None is the matrix's."""

    block: tuple[int | None, int | None] = (128, 128)

    def __call__(self, shape: tuple[int, int], rng: np.random.Generator) -> Fp8Matrix:
        down, across = self.block[0] or shape[0], self.block[1] or shape[1]
        codes = rng.integers(0, 127, shape, np.uint8) | rng.integers(0, 2, shape, np.uint8) << 7
        scales = rng.uniform(1e-4, 4e-4, (-(-shape[0] // down), -(-shape[1] // across))).astype(np.float32)
        return Fp8Matrix(codes, scales, (down, across))


def quantized(name: str, matrix: QuantizedMatrix) -> QuantizedTensor:
    """A tensor that reads the matrix, also as nibbles where it has some."""

    def read(first: int, last: int) -> QuantizedMatrix:
        return matrix.take_rows(slice(first, last))

    has_nibbles = isinstance(matrix, GroupedMatrix) and matrix.bits == 4
    if not has_nibbles or matrix.shape[1] % 8:
        return QuantizedTensor(name, matrix.shape, matrix.format, read)

    def read_nibbles(first: int, last: int) -> NibbleMatrix:
        rows = matrix.take_rows(slice(first, last))
        assert isinstance(rows, GroupedMatrix)
        return NibbleMatrix(pack_bits(rows.codes, 4).T, rows.scales, rows.zeros)

    return QuantizedTensor(name, matrix.shape, matrix.format, read, read_nibbles=read_nibbles)


def quantize_layers(
    checkpoint: MadeCheckpoint, make: Make, seed: int = 0, **others: Make
) -> dict[str, QuantizedMatrix]:
    """Replaces the matrices of all layers, those whose last name is in `others` differently; returns them."""
    rng = np.random.default_rng(seed)
    made: dict[str, QuantizedMatrix] = {}
    for name, shape in checkpoint.shapes().items():
        part = name.rpartition(".")[2]
        if len(shape) == 2 and (name.startswith("layers.") or part in others):
            made[name] = others.get(part, make)((shape[0], shape[1]), rng)
            checkpoint.tensors[name] = quantized(name, made[name])
    return made
