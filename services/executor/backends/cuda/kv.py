"""Paged keys and values on the device: a hot pool that steps write, and colder ones that hold copies of full blocks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from kernels.kv_blocks import copy_blocks, demote_blocks
from kernels.kv_write import NarrowBlocks
from kernels.paged_attention import PagedKv
from services.executor.backends.base import KvShape
from services.executor.backends.cuda.device import Device
from services.executor.backends.torch_blocks import BlockBytes
from services.executor.models.spec import ModelSpec


class GpuKv:
    """All layers' blocks. A block id names its pool."""

    def __init__(self, spec: ModelSpec, shape: KvShape, dtype: torch.dtype, device: Device) -> None:
        self.starts, self.block_size = shape.pool_starts, shape.block_size
        self._device = device
        size = (spec.layer_count, 2 * spec.kv_head_count, shape.block_count, shape.block_size, spec.head_size)
        self._hot = torch.zeros(size, dtype=dtype, device=device.torch_device)
        self._colder = [
            NarrowBlocks.zeros(
                pool.format,
                (spec.layer_count, spec.kv_head_count, pool.block_count, shape.block_size, spec.head_size),
                device.torch_device,
            )
            for pool in shape.colder
        ]
        narrow = [[pool.numbers, pool.key_ranges, pool.value_ranges] for pool in self._colder]
        self._bytes = [BlockBytes(tensors, device.follow) for tensors in ([self._hot], *narrow)]
        self.layers = [
            PagedKv(hot, [pool.layer(index) for pool in self._colder]) for index, hot in enumerate(self._hot.unbind(0))
        ]

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Hot blocks (source, destination), as if in order."""
        copy_blocks(self._hot, pairs)

    def demote(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Blocks (source, destination in a colder pool), in order."""
        found = [(*self._find(source), *self._find(destination)) for source, destination in pairs]
        for (source_pool, target_pool), run in itertools.groupby(found, lambda one: (one[0], one[2])):
            source = self._hot if source_pool == 0 else self._colder[source_pool - 1]
            demote_blocks(source, self._colder[target_pool - 1], [(one[1], one[3]) for one in run])

    def read_block(self, block_id: int) -> memoryview:
        pool, place = self._find(block_id)
        return self._bytes[pool].read(place)

    def write_block(self, block_id: int, block: memoryview) -> None:
        pool, place = self._find(block_id)
        self._bytes[pool].write(place, block)

    def _find(self, block_id: int) -> tuple[int, int]:
        pool = sum(block_id >= start for start in self.starts[1:-1])
        return pool, block_id - self.starts[pool]
