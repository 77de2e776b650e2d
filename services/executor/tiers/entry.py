"""How a block is wrapped outside of memory: a header that names its content and proves it whole.

magic       8 bytes
identity   16    what the content was made by: equal in whoever may read it
key        32
length      8    of the content
digest     16    over all of the above and the content
check      16    over all of the above, so that headers alone can be trusted
"""

from __future__ import annotations

import struct
from hashlib import sha256
from typing import NamedTuple

from services.executor.tiers.store import Outcome, StoreError

_FIELDS = struct.Struct("<8s16s32sQ")
_DIGEST_BYTES = 16
HEADER_BYTES = _FIELDS.size + 2 * _DIGEST_BYTES
IDENTITY_BYTES = 16
_MAGIC = b"quirekv1"


class Stated(NamedTuple):
    """What a sound header says."""

    key: bytes
    length: int


def identity_of(*fields: str) -> bytes:
    """16 bytes that differ where any field does. Fields are framed by their lengths."""
    framed = b"".join(len(part).to_bytes(8, "little") + part for part in map(str.encode, fields))
    return sha256(framed).digest()[:IDENTITY_BYTES]


def make_header(identity: bytes, key: bytes, block: memoryview) -> bytes:
    fields = _FIELDS.pack(_MAGIC, identity, key, block.nbytes)
    stated = fields + _digest(fields, block)
    return stated + _digest(stated)


def read_header(identity: bytes, header: bytes | memoryview) -> Stated | None:
    """What it states; None where it is cut, damaged, or of another identity."""
    header = bytes(header)
    if len(header) != HEADER_BYTES or _digest(header[:-_DIGEST_BYTES]) != header[-_DIGEST_BYTES:]:
        return None
    magic, owner, key, length = _FIELDS.unpack_from(header)
    return Stated(key, length) if (magic, owner) == (_MAGIC, identity) else None


def check_entry(identity: bytes, key: bytes, header: bytes | memoryview, block: memoryview) -> None:
    """Raises StoreError unless the entry is whole and has that key: MISSING for none or another, else DAMAGED."""
    header = bytes(header)
    if not any(header):
        raise StoreError(Outcome.MISSING, "nothing is stored there")
    stated = read_header(identity, header)
    if stated is None:
        raise StoreError(Outcome.DAMAGED, "its header is damaged")
    if stated.key != key:
        raise StoreError(Outcome.MISSING, "other content is stored there")
    digest = header[_FIELDS.size : _FIELDS.size + _DIGEST_BYTES]
    if stated.length != block.nbytes or _digest(header[: _FIELDS.size], block) != digest:
        raise StoreError(Outcome.DAMAGED, "its content is damaged")


def _digest(*parts: bytes | memoryview) -> bytes:
    hashed = sha256()
    for part in parts:
        hashed.update(part)
    return hashed.digest()[:_DIGEST_BYTES]
