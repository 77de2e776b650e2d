"""What a place for blocks below the device must do, and how it fails."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Protocol

KEY_BYTES = 32
NO_KEY = bytes(KEY_BYTES)
"""Of content that has no key: a block that is not full. It does not outlive the process."""


class Outcome(enum.Enum):
    """How a move ended; the values are labels of metrics."""

    DONE = "done"
    MISSING = "missing"  # the content is not there
    DAMAGED = "damaged"  # it is there, but is not what was written
    FULL = "full"  # the store has no room
    UNREACHABLE = "unreachable"  # the store does not answer
    DROPPED = "dropped"  # its epoch was over before its turn
    ERROR = "error"  # a fault of ours


class StoreError(Exception):
    """A read or write that failed. The destination holds nothing usable."""

    def __init__(self, outcome: Outcome, message: str) -> None:
        super().__init__(message)
        self.outcome = outcome


class SlotStore(Protocol):
    """Numbered slots for blocks of one format. Used by one thread at a time."""

    def read(self, slot: int, key: bytes) -> memoryview:
        """The content with that key, valid until the store's next call. Raises StoreError, MISSING for another key."""
        ...

    def write(self, slot: int, key: bytes, block: memoryview) -> None:
        """Replaces the slot's content, whole or not at all. Raises StoreError."""
        ...

    def found(self) -> Mapping[int, bytes]:
        """Keys by slot of what an earlier process left."""
        ...

    def close(self) -> None: ...


class RemoteStore(Protocol):
    """Blocks by key in a store that several executors share. Used by one thread at a time."""

    @property
    def name(self) -> str:
        """Alike wherever it is the same store."""
        ...

    def get(self, format_: str, key: bytes, block_bytes: int) -> memoryview:
        """The content. Raises StoreError."""
        ...

    def put(self, format_: str, key: bytes, block: memoryview) -> None:
        """Stores it whole or not at all. Raises StoreError."""
        ...

    def close(self) -> None: ...
