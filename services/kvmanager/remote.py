"""Which blocks a remote store was given. It belongs to others too, and drops what it likes: this is a belief."""

from __future__ import annotations

from collections import OrderedDict

CAPACITY = 1 << 20
"""Keys that are remembered, about 150 MB; the least recently used go first."""


class RemoteContent:
    """Keys of blocks in one store. A restart forgets them: they are learned again as blocks are exported."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._keys: OrderedDict[bytes, None] = OrderedDict()
        self._capacity = capacity

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def stored(self, key: bytes) -> None:
        """The store took it, or gave it: it is there now."""
        self._keys[key] = None
        self._keys.move_to_end(key)
        if len(self._keys) > self._capacity:
            self._keys.popitem(last=False)

    def missing(self, key: bytes) -> None:
        """The store has dropped it, or is out of reach."""
        self._keys.pop(key, None)
