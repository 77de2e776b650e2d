"""A numbered folder below the one that was named, which one executor has to itself for as long as it lives.

Executors that share a folder each take a shelf; after a restart each finds the one that it filled.
"""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

_LOCK, _LABEL = "lock", "label"


class Shelf:
    """The folder at `path`. Others cannot take it before `close`, or before this process has ended."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock

    def close(self) -> None:
        os.close(self._lock)


def take_shelf(root: Path, label: str) -> Shelf:
    """A free shelf, best one with that label; any other is emptied and labelled anew. Raises OSError."""
    try:
        root.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), root) from None
    choosing = _lock(root / _LOCK, fcntl.LOCK_EX)
    try:
        numbers = sorted(int(path.name) for path in root.iterdir() if path.name.isdecimal())
        free = []
        for number in numbers:
            path = root / str(number)
            try:
                free.append(Shelf(path, _lock(path / _LOCK, fcntl.LOCK_EX | fcntl.LOCK_NB)))
            except BlockingIOError:
                continue
        chosen = next((shelf for shelf in free if _label(shelf.path) == label), next(iter(free), None))
        for shelf in free:
            if shelf is not chosen:
                shelf.close()
        if chosen is None:
            number = next(number for number in range(len(numbers) + 1) if number not in numbers)
            path = root / str(number)
            path.mkdir(mode=0o700)  # KV tells what was said
            chosen = Shelf(path, _lock(path / _LOCK, fcntl.LOCK_EX))
    finally:
        os.close(choosing)
    if _label(chosen.path) != label:
        try:
            for file in chosen.path.iterdir():
                if file.name != _LOCK:
                    file.unlink()
            (chosen.path / _LABEL).write_text(label)
        except OSError:
            chosen.close()
            raise
    return chosen


def _lock(path: Path, how: int) -> int:
    """An open file that is locked. Raises BlockingIOError where another process holds it."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, how)
    except BaseException:
        os.close(file)
        raise
    return file


def _label(shelf: Path) -> str:
    try:
        return (shelf / _LABEL).read_bytes().decode(errors="replace")
    except FileNotFoundError:
        return ""
