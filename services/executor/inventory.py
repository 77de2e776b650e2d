"""Which block holds which settled content. It outlives schedulers and their epochs, but no overwrite and no model."""

from __future__ import annotations

from collections.abc import Iterable

from quire.v1 import executor_pb2
from services.executor.tiers.store import NO_KEY


class Inventory:
    """Block id -> key of one cache group. Mutable; owned by the step thread."""

    def __init__(self, group_id: int = 0) -> None:
        self._group_id = group_id
        self._keys: dict[int, bytes] = {}

    def seal(self, block_id: int, key: bytes) -> None:
        self._keys[block_id] = key

    def key_of(self, block_id: int) -> bytes:
        """The content's key; NO_KEY where it has none, or none that is known."""
        return self._keys.get(block_id, NO_KEY)

    def overwrite(self, block_ids: Iterable[int]) -> None:
        """Forgets blocks that are to be written: from when they are granted, for what was in them no one counts on."""
        for block_id in block_ids:
            self._keys.pop(block_id, None)

    def clear(self) -> None:
        self._keys.clear()

    def __len__(self) -> int:
        return len(self._keys)

    def to_sealed_blocks(self) -> list[executor_pb2.SealedBlock]:
        group = self._group_id
        return [executor_pb2.SealedBlock(block_id=block, key=key, group_id=group) for block, key in self._keys.items()]
