"""Which pool a block id lies in: device pools first, then those of lower tiers. Ids of a group never overlap."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from services.executor.backends.base import KvShape

DEVICE, HOST, DISK = "device", "host", "disk"
TIERS = (DEVICE, HOST, DISK)
"""From the fastest to the slowest."""
MOST_BLOCKS = 1 << 28
"""Of a pool, so that all ids stay below 2^31."""


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """Blocks of one format in one tier, with ids [first, first + count)."""

    pool_id: int
    tier: str
    format: str
    block_bytes: int
    first: int
    count: int

    @property
    def end(self) -> int:
        return self.first + self.count


class PoolMap:
    """All pools of the one cache group, by ascending ids."""

    def __init__(self, pools: Iterable[PoolSpec] = ()) -> None:
        self.pools = tuple(pools)
        self._ends = [pool.end for pool in self.pools]

    def find(self, block_id: int) -> PoolSpec | None:
        """The block's pool, None where the id is in none."""
        if block_id < 0:
            return None
        index = bisect_right(self._ends, block_id)
        return self.pools[index] if index < len(self.pools) else None

    @property
    def lower(self) -> tuple[PoolSpec, ...]:
        return tuple(pool for pool in self.pools if pool.tier != DEVICE)


NO_POOLS = PoolMap()


def device_pools(shape: KvShape, hot_format: str, first_pool_id: int = 0) -> list[PoolSpec]:
    """The pools that steps compute from, as `shape` lays them out."""
    blocks = [(hot_format, shape.block_bytes, shape.block_count)]
    blocks += [(pool.format, pool.block_bytes, pool.block_count) for pool in shape.colder]
    return [
        PoolSpec(first_pool_id + index, DEVICE, format_, size, first, count)
        for index, ((format_, size, count), first) in enumerate(zip(blocks, shape.pool_starts, strict=False))
    ]


def lower_pools(
    above: list[PoolSpec], tier: str, memory: int, slot_bytes: Callable[[int], int] = lambda block_bytes: block_bytes
) -> list[PoolSpec]:
    """Pools of `tier` within `memory` bytes, one for each format that the device has, in the device's proportions.

    They follow the pools `above`. `slot_bytes`: what a block takes there. Raises ValueError where a format would get
    no block.
    """
    device = [pool for pool in above if pool.tier == DEVICE and pool.count]
    whole = sum(pool.count * slot_bytes(pool.block_bytes) for pool in device)
    pools = list(above)
    for pool in device:
        count = min(pool.count * memory // whole, MOST_BLOCKS)
        if count < 1:
            raise ValueError(f"{memory} bytes hold no {pool.format} block beside the others")
        pools.append(PoolSpec(len(pools), tier, pool.format, pool.block_bytes, pools[-1].end, count))
    return pools[len(above) :]
