"""One pool of blocks (executor, group, tier, format, nodes) with the index of its content, kept in step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from services.kvmanager.blocks import BlockPool, BlockState
from services.kvmanager.prefix import PrefixIndex


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """What an executor said of a pool. Tier and format have the numbers of the wire."""

    pool_id: int
    group_id: int
    tier: int
    format: int
    nodes: tuple[int, ...]  # NUMA node of each rank
    block_count: int
    first_block_id: int
    block_size: int  # token slots
    block_bytes: int = 0  # in the pool's format, 0 where unknown
    distance: int = 0  # of the pool from what computes: 10 is local, 0 unknown

    @property
    def node(self) -> int:
        """The first rank's node, -1 for none."""
        return self.nodes[0] if self.nodes else -1

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-tokens // self.block_size)


class Pool:
    """Hands out blocks and finds cached ones. Blocks are indices here; `ids` turns them into the executor's ids."""

    def __init__(self, spec: PoolSpec) -> None:
        self.spec = spec
        self.blocks = BlockPool(spec.block_count)
        self.index = PrefixIndex(spec.block_count)
        self.evicted_count = 0

    def ids(self, blocks: Sequence[int]) -> list[int]:
        first = self.spec.first_block_id
        return [first + block for block in blocks]

    def room_beside(self, matched: Sequence[int]) -> int:
        """Blocks that could be handed out once the matched ones are held."""
        return self.blocks.available_count - self.blocks.idle_among(matched)

    def acquire(self, matched: Sequence[int], new_count: int) -> list[int]:
        """Holds cached blocks, then `new_count` fresh ones; the caller has checked `room_beside`."""
        self.blocks.hold(matched)
        taken = self.blocks.take(new_count)
        for block in taken.evicted:
            self.index.remove(block)
        self.evicted_count += len(taken.evicted)
        return [*matched, *taken.blocks]

    def claim(self, blocks: Sequence[int]) -> None:
        """Takes these very blocks, which are free, as `acquire` would: a holder from before comes back."""
        self.blocks.claim(blocks)

    def oldest_cached(self, count: int) -> list[int]:
        """The cached blocks that would be evicted next."""
        return self.blocks.oldest(count)

    def discard(self, block: int) -> None:
        """Drops the content of a block that nobody holds, as of one that is kept elsewhere; others stay as they are."""
        if self.blocks.idle_among([block]) and self.blocks.is_keyed(block):
            self.index.remove(block)
            self.blocks.forget(block)

    def settle(self, block: int, key: bytes) -> bool:
        """Marks a held block as full. True where it became the block of its key, False where another one is."""
        self.blocks.advance(block, BlockState.READY)
        if not self.index.add(key, block):
            return False
        self.blocks.keep(block)
        return True

    def release(self, blocks: Sequence[int], keys: Sequence[bytes]) -> None:
        """Takes one holder from each block, last first. `keys` belong to the leading blocks.

        Where a leading block has no key because another block had the same content first, that one counts as used
        now, so that it does not go before the blocks that follow it.
        """
        for position in range(len(blocks) - 1, -1, -1):
            block = blocks[position]
            keyed = self.blocks.is_keyed(block)
            self.blocks.drop(block)
            if not keyed and position < len(keys):
                twin = self.index.find(keys[position])
                if twin is not None:
                    self.blocks.touch(twin)

    def restore(self, content: Mapping[int, bytes]) -> None:
        """Takes over known content of free blocks, in the order in which it was settled: the last goes first."""
        if len(set(content.values())) != len(content):
            raise ValueError("two blocks with one key")
        self.blocks.restore(list(content)[::-1])
        for block, key in content.items():
            self.index.add(key, block)

    def keep_only(self, content: Mapping[int, bytes]) -> None:
        """Forgets every key that `content` (block to key) does not confirm."""
        for key, block in list(self.index.items()):
            if content.get(block) != key:
                self.index.remove(block)
                self.blocks.forget(block)
