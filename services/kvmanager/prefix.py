"""Which block holds which content: one block per key, one key per block, within one pool."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence


class PrefixIndex:
    """Keys of settled blocks. Only ready blocks are added, so every match can be read at once."""

    def __init__(self, block_count: int) -> None:
        self._block_by_key: dict[bytes, int] = {}
        self._key_by_block: list[bytes | None] = [None] * block_count
        self.block_by_key: Mapping[bytes, int] = self._block_by_key
        """For reading alone; changes as the index does."""

    def __len__(self) -> int:
        return len(self._block_by_key)

    def items(self) -> Iterator[tuple[bytes, int]]:
        return iter(self._block_by_key.items())

    def find(self, key: bytes) -> int | None:
        return self._block_by_key.get(key)

    def key_of(self, block: int) -> bytes | None:
        return self._key_by_block[block]

    def one_sided(self) -> int:
        """Entries that their block does not confirm: always 0 unless the books are broken."""
        keys = self._key_by_block
        return sum([keys[block] is not key for key, block in self._block_by_key.items()])

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """Blocks of the longest leading run of known keys. Changes nothing."""
        find, blocks = self._block_by_key.get, []
        for key in keys:
            block = find(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def add(self, key: bytes, block: int) -> bool:
        """Records the content of a block that has no key yet. The first block wins: False where the key is known."""
        if self._key_by_block[block] is not None:
            raise ValueError(f"block {block} already has a key")
        if self._block_by_key.setdefault(key, block) != block:
            return False
        self._key_by_block[block] = key
        return True

    def remove(self, block: int) -> bytes:
        """Forgets the content of a keyed block, and returns its key."""
        key = self._key_by_block[block]
        if key is None:
            raise ValueError(f"block {block} has no key")
        self._key_by_block[block] = None
        del self._block_by_key[key]
        return key
