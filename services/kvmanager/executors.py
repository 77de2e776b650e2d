"""An executor as the kvmanager sees it: its pools, its epochs, and whether it is connected."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from services.kvmanager.holdings import Holding
from services.kvmanager.keys import KEY_BYTES
from services.kvmanager.pools import Pool, PoolSpec


@dataclass(frozen=True, slots=True)
class ExecutorSpec:
    """What an executor said of itself. Equal specs have equal blocks."""

    executor_id: str
    model_fingerprint: str  # empty while no model is loaded
    pools: tuple[PoolSpec, ...]


class InventoryBlock(NamedTuple):
    """A block whose content the executor knows."""

    group_id: int
    block_id: int
    key: bytes


class Place(NamedTuple):
    """Where a sequence can live: one pool per cache group, all on the same nodes."""

    pools: tuple[Pool, ...]

    @property
    def node(self) -> int:
        return self.pools[0].spec.node


class Executor:
    """Pools and epochs of one executor. Outlives its connection as long as sequences hold its blocks."""

    def __init__(self, spec: ExecutorSpec, epoch: int) -> None:
        self.spec = spec
        self.pools = [Pool(pool) for pool in spec.pools]
        self.places = _places(self.pools)
        self.epoch = epoch  # the newest one heard of
        self.closed_through = -1  # nothing runs any more in this epoch and older ones
        self.connected = True
        self.holdings: set[Holding] = set()

    @property
    def available_count(self) -> int:
        return sum(pool.blocks.available_count for pool in self.pools)

    @property
    def block_count(self) -> int:
        return sum(pool.blocks.count for pool in self.pools)

    def takes(self, model_fingerprint: str, epoch: int) -> bool:
        """Whether sequences of that epoch may be placed here. A scheduler may know a newer epoch before we do."""
        return (
            self.connected
            and self.spec.model_fingerprint == model_fingerprint
            and epoch >= self.epoch
            and epoch > self.closed_through
        )

    def has_ended(self, epoch: int) -> bool:
        """Whether nothing of that epoch can write any more: it was closed, or the executor is gone."""
        return epoch <= self.closed_through or not self.connected

    def continues(self, spec: ExecutorSpec, epoch: int) -> bool:
        """Whether a new registration is the same process with the same blocks; its epochs never go back."""
        return spec == self.spec and epoch >= self.epoch

    def restore(self, inventory: Iterable[InventoryBlock]) -> int:
        """Takes over the content of a newly registered executor. Returns how many entries were unusable."""
        content, refused = self._by_pool(inventory)
        for pool, blocks in zip(self.pools, content, strict=True):
            pool.restore(blocks)
        return refused

    def confirm(self, inventory: Iterable[InventoryBlock]) -> int:
        """Keeps only the content that a returning executor confirms. Returns how many entries were unusable."""
        content, refused = self._by_pool(inventory)
        for pool, blocks in zip(self.pools, content, strict=True):
            pool.keep_only(blocks)
        return refused

    def _by_pool(self, inventory: Iterable[InventoryBlock]) -> tuple[Sequence[Mapping[int, bytes]], int]:
        content: list[dict[int, bytes]] = [{} for _ in self.pools]
        keys: list[set[bytes]] = [set() for _ in self.pools]
        refused = 0
        for entry in inventory:
            for pool, blocks, known in zip(self.pools, content, keys, strict=True):
                block = entry.block_id - pool.spec.first_block_id
                if pool.spec.group_id == entry.group_id and 0 <= block < pool.spec.block_count:
                    if len(entry.key) == KEY_BYTES and block not in blocks and entry.key not in known:
                        blocks[block] = entry.key
                        known.add(entry.key)
                    else:
                        refused += 1
                    break
            else:
                refused += 1
        return content, refused


def _places(pools: Sequence[Pool]) -> list[Place]:
    """Pools that belong together: those on the same nodes, ordered by group. Registration saw to it that none lacks."""
    by_nodes: dict[tuple[int, ...], list[Pool]] = {}
    for pool in pools:
        by_nodes.setdefault(pool.spec.nodes, []).append(pool)
    return [Place(tuple(sorted(group, key=lambda pool: pool.spec.group_id))) for group in by_nodes.values()]
