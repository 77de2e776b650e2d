"""A checkpoint's packed weights: packed once into the user's cache, mapped from there by every later start."""

from __future__ import annotations

import hashlib
import logging
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple
from pathlib import Path

from services.executor.backends.cpu.packed_cache import CacheEntry, find_or_make
from services.executor.backends.cpu.packed_file import VERSION, Contents, NewPackedFile, open_packed
from services.executor.backends.cpu.packed_weights import PackedWeights, own_memory
from services.executor.backends.cpu.packing import pack
from services.executor.backends.cpu.packing_plan import PackingPlan, plan_for
from services.executor.models.catalogue import derived_folder
from services.executor.models.weights import Bytes, Checkpoint, file_digest, load_failed

log = logging.getLogger("quire.executor")


def load_packed(checkpoint: Checkpoint, wanted: str, threads: int, folder: Path | None = None) -> PackedWeights:
    """The weights, matrices in the native format `wanted` (auto: the nearest to how each is stored).

    They are found in the cache as long as the checkpoint's files keep their sizes and times of change. A cache that
    cannot be used costs memory and time, never the start. Raises MODEL_LOAD_FAILED naming a tensor that cannot be
    packed, or where the checkpoint changes meanwhile.
    """
    started = time.monotonic()
    entry = CacheEntry(folder or derived_folder("packed"), _source(checkpoint.files(), wanted), _state(checkpoint))
    weights, how = open_packed(entry.path), "mapped"
    if weights is None:
        packing = _Packing(checkpoint, plan_for(checkpoint, wanted), threads, entry.state)
        weights, how = find_or_make(entry, packing.size, packing.into_file), "packed into the cache"
        if weights is None:
            weights, how = packing.in_memory(), "packed into memory"
    log.info(
        "weights ready",
        extra={
            "how": how,
            "formats": weights.formats,
            "converted": ", ".join(weights.conversions) or "none",
            "mib": weights.buffer.nbytes >> 20,
            "seconds": round(time.monotonic() - started, 3),
        },
    )
    return weights


class _Packing:
    """One checkpoint about to be packed."""

    def __init__(self, checkpoint: Checkpoint, plan: PackingPlan, threads: int, state: str) -> None:
        self._checkpoint, self._plan, self._threads, self._state = checkpoint, plan, threads, state
        self.size = plan.size

    def into_file(self, descriptor: int) -> None:
        file = NewPackedFile(descriptor, self._contents(), self.size)
        self._fill(file.buffer)
        file.finish()

    def in_memory(self) -> PackedWeights:
        buffer = own_memory(self.size)
        self._fill(buffer)
        return self._contents().weights(buffer, mapped_bytes=0)

    def _contents(self) -> Contents:
        with ThreadPoolExecutor(self._threads) as pool:
            digests = tuple(digest.hex() for digest in pool.map(file_digest, self._checkpoint.files()))
        return Contents.of(self._plan, digests, self._checkpoint.spec.tied_embeddings)

    def _fill(self, buffer: Bytes) -> None:
        pack(self._checkpoint, self._plan, buffer, self._threads)
        if _state(self._checkpoint) != self._state:
            raise load_failed(f"{self._checkpoint.files()[0]} changed while it was read")


def _source(files: Sequence[Path], wanted: str) -> str:
    """A name for a checkpoint and what it is packed as, readable at the front."""
    paths = [str(path.absolute()) for path in files]
    name = files[0].stem if len(files) == 1 and files[0].suffix == ".gguf" else files[0].absolute().parent.name
    return f"{re.sub(r'[^A-Za-z0-9._-]', '_', name)[:64]}.{wanted}.{_short_digest(paths)}"


def _state(checkpoint: Checkpoint) -> str:
    """Changes with the files, with how they are read, and with how they are packed."""
    stats = [path.stat() for path in checkpoint.files()]
    files = [(stat.st_size, stat.st_mtime_ns, stat.st_ino) for stat in stats]
    formats = [(name, str(format_)) for name, format_ in checkpoint.formats().items()]
    return _short_digest([VERSION, files, astuple(checkpoint.spec), formats])


def _short_digest(parts: Sequence[object]) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
