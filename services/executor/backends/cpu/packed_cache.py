"""The folder of packed files: which is whose, one packing at a time, and nothing left of older states.

To free the room, delete the folder: running executors keep what they have mapped.
"""

from __future__ import annotations

import fcntl
import glob
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from services.executor.backends.cpu.packed_file import open_packed
from services.executor.backends.cpu.packed_weights import PackedWeights

log = logging.getLogger("quire.executor")

_SPARE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """A file's place: what was packed, and the state it was in."""

    folder: Path
    source: str
    state: str

    @property
    def path(self) -> Path:
        return self.folder / f"{self.source}.{self.state}.packed"

    @property
    def partial(self) -> Path:
        """Where the file is written. Its writer holds a lock on it, so what is not locked is left over."""
        return self.folder / f".{self.path.name}.partial"


def has_room(size: int, free: int, total: int) -> bool:
    """Whether a file system with `free` of `total` bytes has enough to spare beside a new file."""
    return free - size >= min(_SPARE_BYTES, total // 20)


def find_or_make(entry: CacheEntry, size: int, make: Callable[[int], None]) -> PackedWeights | None:
    """The entry's weights, where need be written by `make` into an open file of about `size` bytes.

    None, with a line in the log, where the folder cannot take the file. Passes on what `make` raises, but for OSError.
    """
    try:
        entry.folder.mkdir(parents=True, exist_ok=True)
        while True:
            with _locked(entry.partial) as descriptor:
                if descriptor is not None:
                    return _find_or_write(entry, size, make, descriptor)
    except OSError as error:
        log.warning("packed weights cannot be kept", extra={"folder": str(entry.folder), "error": str(error)})
        return None


def _find_or_write(entry: CacheEntry, size: int, make: Callable[[int], None], descriptor: int) -> PackedWeights:
    try:
        found = open_packed(entry.path)  # another process may just have finished it
        if found is not None:
            entry.partial.unlink()
            return found
        room = os.fstatvfs(descriptor)
        if not has_room(size, room.f_bavail * room.f_frsize, room.f_blocks * room.f_frsize):
            raise OSError(f"{size >> 20} MiB would nearly fill the disk")
        make(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)  # read back, it comes in huge pages
        os.replace(entry.partial, entry.path)
    except BaseException:
        entry.partial.unlink(missing_ok=True)
        raise
    _remove_older(entry)
    found = open_packed(entry.path)
    if found is None:
        raise OSError(f"{entry.path.name} cannot be read back")
    return found


@contextmanager
def _locked(partial: Path) -> Iterator[int | None]:
    """The file open and locked; None where another process finished or gave up on it while this one waited."""
    descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("another process packs these weights; waiting for it")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor if _is_at(descriptor, partial) else None
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing does not: a mapping holds a copy of the descriptor
        os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _remove_older(entry: CacheEntry) -> None:
    """Removes the source's files of other states, and what interrupted packings left of them."""
    pattern = glob.escape(entry.source) + ".*.packed"
    for path in set(entry.folder.glob(pattern)) - {entry.path}:
        with suppress(OSError):
            path.unlink()
    for path in entry.folder.glob(f".{pattern}.partial"):
        with suppress(OSError), path.open("rb+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
