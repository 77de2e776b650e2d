"""The document of keys in a file: read again whenever the file has changed, written whole or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from services.gateway.keys.document import Document, Roster, parse, roster_of

log = logging.getLogger("quire.gateway.keys")

_Stamp = tuple[int, int, int]


class KeyFile:
    """The keys of one file. A file that became unreadable changes nothing; the log says so once."""

    def __init__(self, path: Path) -> None:
        """Raises ValueError, naming what is wrong, where the file cannot be read."""
        self._path = path
        self._stamp = _stamp(path)
        self._roster = roster_of(read_keys(path))

    @property
    def roster(self) -> Roster:
        """Who is known now."""
        self._follow()
        return self._roster

    def _follow(self) -> None:
        stamp = _stamp(self._path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._roster = roster_of(read_keys(self._path))
        except ValueError as error:
            log.error("the keys stay as they were", extra={"error": str(error)})
        else:
            log.info("keys read", extra={"keys": len(self._roster)})


def read_keys(path: Path) -> Document:
    """The document in a file. Raises ValueError naming file and field."""
    try:
        return parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    except ValueError as error:  # what it says is wrong, or it is neither text nor TOML
        raise ValueError(f"{path}: {error}") from None


class FilePlace:
    """Where `quire keys` edits a document: a file that only its owner may read."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> str:
        """The text; empty where there is no file yet. Raises ValueError where it cannot be read."""
        try:
            return self._path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return ""
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{self._path}: {error}") from None

    def edit(self, change: Callable[[str], str]) -> None:
        """Writes what `change` makes of the text. Readers see the old text or the new one, editors come in turn."""
        try:
            with self._locked():
                text = change(self.read())
                beside = self._path.with_name(f".{self._path.name}.new")
                mode = self._path.stat().st_mode & 0o777 if self._path.exists() else 0o600
                with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "w", encoding="utf-8") as file:
                    file.write(text)
                    file.flush()
                    os.fsync(file.fileno())
                beside.chmod(mode)
                beside.replace(self._path)
        except OSError as error:
            raise ValueError(f"{self._path}: {error.strerror}") from error

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        folder = os.open(self._path.absolute().parent, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            yield
        finally:
            os.close(folder)


def _stamp(path: Path) -> _Stamp | None:
    """What changes with the file; None where there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
