"""Keys of full blocks: what their KV was computed from, hashed alike in every process and on every machine."""

from __future__ import annotations

import sys
from array import array
from dataclasses import dataclass
from hashlib import sha256

KEY_BYTES = 32
ROOT = b""
"""The parent of a first block."""


@dataclass(frozen=True, slots=True)
class KeySpace:
    """What KV depends on besides tokens. Blocks are shared only where all of it is equal."""

    model_fingerprint: str
    namespace: str  # whose prefixes may be shared
    kv_policy: str = ""  # which formats at which ages; empty is hot only
    adapter: str = ""

    def prefix(self, group_id: int) -> bytes:
        """The leading bytes of what is hashed for every block of a cache group."""
        fields = (self.model_fingerprint, str(group_id), self.kv_policy, self.namespace, self.adapter)
        return b"".join(_framed(field.encode()) for field in fields)


def pack(tokens: array[int], start: int, stop: int) -> bytes:
    """A stretch of token ids (an array of type "i") as 32-bit little-endian integers."""
    if sys.byteorder == "big":
        swapped = tokens[start:stop]
        swapped.byteswap()
        return swapped.tobytes()
    return memoryview(tokens)[start:stop].tobytes()


def block_keys(prefix: bytes, parent: bytes, packed_tokens: bytes, block_size: int) -> list[bytes]:
    """Keys of the consecutive full blocks in `packed_tokens`; a partial last block has none.

    `parent` is the key of the block before them, ROOT for none. Each key is the SHA-256 of prefix, parent and tokens,
    every field preceded by its length, so no field can run into the next.
    """
    width = 4 * block_size
    before_tokens = _length(width)
    before_parent = prefix + _length(len(parent))
    keys: list[bytes] = []
    for start in range(0, len(packed_tokens) - width + 1, width):
        tokens = packed_tokens[start : start + width]
        parent = sha256(b"".join((before_parent, parent, before_tokens, tokens))).digest()
        if not keys:
            before_parent = prefix + _length(KEY_BYTES)
        keys.append(parent)
    return keys


def _length(size: int) -> bytes:
    return size.to_bytes(8, "little")


def _framed(field: bytes) -> bytes:
    return _length(len(field)) + field
