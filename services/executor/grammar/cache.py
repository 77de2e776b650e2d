"""Compiled grammars, the most recently used ones, bounded by the memory that they take."""

from __future__ import annotations

from collections import OrderedDict

from llguidance import LLMatcher

FIXED_BYTES = 96 << 10
BYTES_PER_BYTE = 128
"""Of a compiled grammar: at least so much, and per byte of its text. Measured over schemas of 20 bytes to 60 kB (8 to
120 times their text) with the states that use adds."""


def memory_of(grammar: str) -> int:
    """Bytes that a compiled grammar is taken to need; the library does not say."""
    return FIXED_BYTES + BYTES_PER_BYTE * len(grammar)


class GrammarCache:
    """Matchers at the beginning of their grammars; sequences get copies, which share what the first has worked out.

    For one thread.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._kept: OrderedDict[bytes, tuple[LLMatcher, int]] = OrderedDict()
        self.byte_count = 0

    def __len__(self) -> int:
        return len(self._kept)

    def copy(self, key: bytes) -> LLMatcher | None:
        """A new matcher, where the grammar is kept."""
        found = self._kept.get(key)
        if found is None:
            return None
        self._kept.move_to_end(key)
        return found[0].deep_copy()

    def keep(self, key: bytes, matcher: LLMatcher, byte_count: int) -> None:
        """Keeps a matcher at its beginning; lets go of the longest unused ones. What alone is too large is not kept."""
        if byte_count > self._max_bytes or key in self._kept:
            return
        self._kept[key] = matcher, byte_count
        self.byte_count += byte_count
        while self.byte_count > self._max_bytes:
            _, (_, freed) = self._kept.popitem(last=False)
            self.byte_count -= freed
