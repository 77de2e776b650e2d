"""Small results computed from a model's files, kept in the user's cache so that later starts need not compute them.

A result is found again as long as the files' sizes and times of change stay, and the code that made it too. A cache
that cannot be read or written costs time, never the start.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from services.executor.models.catalogue import derived_folder

log = logging.getLogger("quire.executor.models")
_DIGEST_BYTES = 32


def derived(what: str, files: Sequence[Path], make: Callable[[], bytes], folder: Path | None = None) -> bytes:
    """What `make` gives for these files. One result is kept per kind and files; a newer one replaces it."""
    folder = folder or derived_folder(what)
    name = hashlib.sha256(json.dumps([what, *(str(path.absolute()) for path in files)]).encode()).hexdigest()[:32]
    state = _state(files)  # before `make` reads them: a change meanwhile must not be taken for the old content
    kept = folder / name
    found = _read(kept, state)
    if found is not None:
        return found
    made = make()
    _write(kept, state, made)
    return made


def _state(files: Sequence[Path]) -> bytes:
    """Digest of the files' sizes and times, and of this package's code."""
    digest = hashlib.sha256()
    for path in files:
        status = path.stat()
        digest.update(f"{status.st_size} {status.st_mtime_ns} {status.st_ino}\n".encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return digest.digest()


def _read(kept: Path, state: bytes) -> bytes | None:
    """The content, where it was made from this state and is whole."""
    try:
        data = kept.read_bytes()
    except OSError:
        return None
    content = data[2 * _DIGEST_BYTES :]
    whole = (
        data[:_DIGEST_BYTES] == state and data[_DIGEST_BYTES : 2 * _DIGEST_BYTES] == hashlib.sha256(content).digest()
    )
    return content if whole else None


def _write(kept: Path, state: bytes, content: bytes) -> None:
    fresh = kept.with_name(f"{kept.name}.{os.getpid()}.new")
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        fresh.write_bytes(state + hashlib.sha256(content).digest() + content)
        os.replace(fresh, kept)
    except OSError as error:
        log.info("a derived file could not be kept", extra={"path": str(kept), "error": str(error)})
