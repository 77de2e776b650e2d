"""Blocks in host memory, below a device that computes from memory of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from services.executor.tiers.store import Outcome, StoreError

Bytes = NDArray[np.uint8]


class HostStore:
    """A plain array: it dies with the process, so it needs neither checksums nor keys on the outside."""

    def __init__(self, block_bytes: int, slot_count: int, allocate: Callable[[int], Bytes]) -> None:
        """`allocate` gives so many bytes, from the device's own node and pinned where that helps."""
        self._slots = allocate(block_bytes * slot_count).reshape(slot_count, block_bytes)
        self._keys: dict[int, bytes] = {}

    def read(self, slot: int, key: bytes) -> memoryview:
        if self._keys.get(slot) != key:
            raise StoreError(Outcome.MISSING, "other content is stored there")
        slot_bytes: Bytes = self._slots[slot]
        return slot_bytes.data

    def write(self, slot: int, key: bytes, block: memoryview) -> None:
        self._keys.pop(slot, None)
        self._slots[slot] = np.frombuffer(block, np.uint8)
        self._keys[slot] = key

    def found(self) -> Mapping[int, bytes]:
        return {}

    def close(self) -> None:
        self._keys.clear()
