"""A file of packed weights: a header, the buffer from a page's start on, and a mark that says that all is there.

8 bytes   magic                                    64 bits little endian where not said otherwise
8         version of the layout
8         length of the contents
8         where the buffer starts
8         length of the buffer
32        SHA-256 of all above and of the contents
contents  JSON
...       zeros up to the buffer
buffer
40        the magic and the SHA-256 again; the file ends here
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import struct
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from services.executor.backends.cpu.packed_weights import PackedMatrix, PackedWeights
from services.executor.backends.cpu.packing_plan import PackingPlan
from services.executor.models.weights import Bytes

VERSION = 3
"""Rises with every change to what a packed buffer holds: layouts, formats, how weights are rounded."""

_MAGIC = b"QUIREPAK"
_FIXED = struct.Struct("<8sQQQQ")
_DIGEST_BYTES = 32
_BUFFER_ALIGNMENT = 1 << 16  # a page on every machine
_MADV_POPULATE_READ = 22  # Linux 5.14


@dataclass(frozen=True, slots=True)
class Contents:
    """What the file says of its buffer."""

    matrices: dict[str, PackedMatrix]
    vectors: dict[str, int]
    formats: str
    conversions: tuple[str, ...]
    source_digests: tuple[str, ...]

    @classmethod
    def of(cls, plan: PackingPlan, source_digests: tuple[str, ...], tied: bool) -> Contents:
        matrices = {matrix.layout.name: matrix.packed for matrix in plan.matrices}
        if tied:
            matrices["head"] = matrices["embedding"]
        vectors = {vector.layout.name: vector.offset for vector in plan.vectors}
        vectors |= {order.name: order.offset for order in plan.orders}
        return cls(matrices, vectors, plan.formats, plan.conversions, source_digests)

    def weights(self, buffer: Bytes, mapped_bytes: int) -> PackedWeights:
        """These contents of this buffer, which becomes read-only."""
        buffer.flags.writeable = False
        return PackedWeights(
            buffer, self.matrices, self.vectors, self.formats, self.conversions, self.source_digests, mapped_bytes
        )


class NewPackedFile:
    """An open file under construction; its buffer is mapped, so that packing into it takes no memory of its own."""

    def __init__(self, descriptor: int, contents: Contents, buffer_size: int) -> None:
        """Takes the room on the disk. Raises OSError where there is none."""
        self._descriptor = descriptor
        text = json.dumps(asdict(contents)).encode()
        start = -(-(_FIXED.size + _DIGEST_BYTES + len(text)) // _BUFFER_ALIGNMENT) * _BUFFER_ALIGNMENT
        fixed = _FIXED.pack(_MAGIC, VERSION, len(text), start, buffer_size)
        digest = hashlib.sha256(fixed + text).digest()
        self._header, self._mark = fixed + digest + text, _MAGIC + digest
        self._mark_at = start + buffer_size
        os.ftruncate(descriptor, 0)
        # A write to a mapped page that finds the disk full would kill the process.
        os.posix_fallocate(descriptor, 0, self._mark_at + len(self._mark))
        mapped = mmap.mmap(descriptor, self._mark_at)
        self.buffer: Bytes = np.frombuffer(mapped, np.uint8)[start:]

    def finish(self) -> None:
        """Makes the file whole. The mark comes after all else is on the disk: no crash leaves it there alone."""
        _write(self._descriptor, self._header, 0)
        os.fsync(self._descriptor)
        _write(self._descriptor, self._mark, self._mark_at)


def open_packed(path: Path) -> PackedWeights | None:
    """The weights in a file, mapped: other processes share the pages. None where it is no whole file of this version.

    Reads the contents alone.
    """
    try:
        with path.open("rb") as file:
            fixed = file.read(_FIXED.size)
            if len(fixed) < _FIXED.size:
                return None
            magic, version, length, start, buffer_size = _FIXED.unpack(fixed)
            end = start + buffer_size
            size = os.fstat(file.fileno()).st_size
            if magic != _MAGIC or version != VERSION or size != end + len(_MAGIC) + _DIGEST_BYTES or length > start:
                return None
            digest, text = file.read(_DIGEST_BYTES), file.read(length)
            if digest != hashlib.sha256(fixed + text).digest():
                return None
            file.seek(end)
            if file.read() != _MAGIC + digest:
                return None
            mapped = mmap.mmap(file.fileno(), end, prot=mmap.PROT_READ)
            _fault_in(mapped)
    except OSError:
        return None
    buffer = np.frombuffer(mapped, np.uint8)[start:]
    return _contents(json.loads(text)).weights(buffer, mapped_bytes=buffer.nbytes)


def _fault_in(mapped: mmap.mmap) -> None:
    """Maps all pages now, in huge ones where the file system has such; any later, and its cache holds small ones."""
    for advice in (mmap.MADV_HUGEPAGE, _MADV_POPULATE_READ):
        with suppress(OSError):  # an older kernel, or one without huge pages: pages come one by one
            mapped.madvise(advice)


def _contents(fields: dict[str, Any]) -> Contents:
    return Contents(
        {name: PackedMatrix(*numbers) for name, numbers in fields["matrices"].items()},
        fields["vectors"],
        fields["formats"],
        tuple(fields["conversions"]),
        tuple(fields["source_digests"]),
    )


def _write(descriptor: int, data: bytes, at: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, at)
        data, at = data[written:], at + written
