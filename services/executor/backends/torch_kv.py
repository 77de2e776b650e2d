"""Paged keys and values in torch: a hot pool that steps write, and colder ones that hold copies of full blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.kv_write import NarrowBlocks
from services.executor.backends.base import KvShape
from services.executor.backends.torch_blocks import BlockBytes
from services.executor.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's share of all pools."""

    hot: Tensor  # [2 * kv heads, blocks, block size, head size]
    colder: Sequence[NarrowBlocks]


class TorchKv:
    """All layers' blocks. A block id names its pool."""

    def __init__(self, spec: ModelSpec, shape: KvShape, dtype: torch.dtype, device: torch.device) -> None:
        self.starts = shape.pool_starts
        self.block_size = shape.block_size
        size = (spec.layer_count, 2 * spec.kv_head_count, shape.block_count, shape.block_size, spec.head_size)
        self.hot = _zeros(size, dtype, device)  # [layers, 2 * kv heads, blocks, block size, head size]
        self.colder = [
            NarrowBlocks.zeros(
                pool.format,
                (spec.layer_count, spec.kv_head_count, pool.block_count, shape.block_size, spec.head_size),
                device,
            )
            for pool in shape.colder
        ]
        narrow = [[pool.numbers, pool.key_ranges, pool.value_ranges] for pool in self.colder]
        self._bytes = [BlockBytes(tensors) for tensors in ([self.hot], *narrow)]
        self.layers = [
            LayerCache(hot, [pool.layer(index) for pool in self.colder]) for index, hot in enumerate(self.hot.unbind(0))
        ]

    @property
    def nbytes(self) -> int:
        return self.hot.nbytes + sum(pool.nbytes for pool in self.colder)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Hot blocks (source, destination), in order."""
        for source, destination in pairs:
            self.hot[:, :, destination] = self.hot[:, :, source]

    def demote(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Blocks (source, destination in a colder pool), in order."""
        for source, destination in pairs:
            pool, place = self._find(destination)
            self.colder[pool - 1].write(place, self._read(source))

    def read_block(self, block_id: int) -> memoryview:
        pool, place = self._find(block_id)
        return self._bytes[pool].read(place)

    def write_block(self, block_id: int, block: memoryview) -> None:
        pool, place = self._find(block_id)
        self._bytes[pool].write(place, block)

    def _read(self, block_id: int) -> Tensor:
        """Keys and values [layers, 2 * kv heads, block size, head size]."""
        pool, place = self._find(block_id)
        if pool == 0:
            return self.hot[:, :, place]
        return self.colder[pool - 1].read(torch.tensor([place], device=self.hot.device)).squeeze(-3)

    def _find(self, block_id: int) -> tuple[int, int]:
        pool = sum(block_id >= start for start in self.starts[1:-1])
        return pool, block_id - self.starts[pool]


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    # Pages that the kernel zeroes on first use: torch.zeros would touch gigabytes at start.
    memory = np.zeros(math.prod(size) * dtype.itemsize, np.uint8)
    return torch.from_numpy(memory).view(dtype).view(size)
