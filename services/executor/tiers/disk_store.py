"""Blocks in one file of fixed slots. An entry counts once its header is there, and only while it is whole.

Written with pwrite and not through a mapping: a full disk is an error to a call, but a deadly signal to a mapping.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Mapping
from pathlib import Path

from services.executor.tiers.entry import HEADER_BYTES, check_entry, make_header, read_header
from services.executor.tiers.store import NO_KEY, Outcome, StoreError

log = logging.getLogger("quire.executor")

PAGE = 4096
_NO_HEADER = bytes(HEADER_BYTES)


def slot_bytes(block_bytes: int) -> int:
    """Whole pages, so that no page that tears belongs to two entries."""
    return -(-(HEADER_BYTES + block_bytes) // PAGE) * PAGE


class DiskStore:
    """The file's whole entries of the same identity are found again; everything else counts as empty."""

    def __init__(self, path: Path, identity: bytes, block_bytes: int, slot_count: int) -> None:
        """Raises OSError where the file cannot be used."""
        self._path, self._identity, self._block_bytes = path, identity, block_bytes
        self._stride = slot_bytes(block_bytes)
        self._header = bytearray(HEADER_BYTES)
        self._block = bytearray(block_bytes)
        self._complains = True  # said once until a write succeeds
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._found = self._scan(min(slot_count, -(-os.fstat(self._file).st_size // self._stride)))
            os.ftruncate(self._file, slot_count * self._stride)  # takes room only where something is written
        except BaseException:
            os.close(self._file)
            raise

    def found(self) -> Mapping[int, bytes]:
        return self._found

    def read(self, slot: int, key: bytes) -> memoryview:
        block = memoryview(self._block)
        try:
            self._read_into([memoryview(self._header), block], slot * self._stride)
        except OSError as error:
            raise StoreError(Outcome.DAMAGED, f"{self._path}: {error.strerror}") from error
        try:
            check_entry(self._identity, key, bytes(self._header), block)
        except StoreError as error:
            if error.outcome is Outcome.DAMAGED:
                log.warning("a KV block on disk is damaged", extra={"file": str(self._path), "slot": slot})
            raise
        return block

    def write(self, slot: int, key: bytes, block: memoryview) -> None:
        start = slot * self._stride
        header = make_header(self._identity, key, block)
        try:
            # The header last: a process that dies between two of these leaves an empty slot. What a machine that dies
            # leaves in which order nobody knows, but the digest tells.
            self._write(_NO_HEADER, start)
            self._write(block, start + HEADER_BYTES)
            self._write(header, start)
        except OSError as error:
            if self._complains:
                self._complains = False
                log.warning(
                    "KV blocks cannot be written to disk", extra={"file": str(self._path), "why": error.strerror}
                )
            outcome = Outcome.FULL if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else Outcome.ERROR
            raise StoreError(outcome, f"{self._path}: {error.strerror}") from error
        if not self._complains:
            self._complains = True
            log.info("KV blocks can be written to disk again", extra={"file": str(self._path)})

    def close(self) -> None:
        os.close(self._file)

    def _scan(self, slot_count: int) -> dict[int, bytes]:
        """Keys of entries with sound headers. Content is checked when it is read: all of it would take too long."""
        size = os.fstat(self._file).st_size
        found = {}
        for slot in range(slot_count):
            start = slot * self._stride
            header = os.pread(self._file, HEADER_BYTES, start)
            stated = read_header(self._identity, header)
            if stated is None or stated.key == NO_KEY or start + HEADER_BYTES + stated.length > size:
                if any(header):
                    self._write(_NO_HEADER, start)
                continue
            found[slot] = stated.key
        return found

    def _write(self, data: bytes | memoryview, at: int) -> None:
        left = memoryview(data)
        while left:
            written = os.pwrite(self._file, left, at)
            left, at = left[written:], at + written

    def _read_into(self, parts: list[memoryview], at: int) -> None:
        """Fills the parts; beyond the file's end they are zero."""
        while parts:
            count = os.preadv(self._file, parts, at)
            at += count
            if count == 0:
                for part in parts:
                    part[:] = bytes(len(part))
                return
            while parts and count >= len(parts[0]):
                count -= len(parts[0])
                parts = parts[1:]
            if count:
                parts = [parts[0][count:], *parts[1:]]
