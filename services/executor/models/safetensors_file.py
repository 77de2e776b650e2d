"""Reads safetensors files as mapped memory, without a tensor library: bf16 has no numpy type."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from services.executor.models.weights import PLAIN_FORMATS, Bytes, Shape, load_failed
from services.executor.quant.parts import TYPES, Part

_MAX_HEADER_BYTES = 100 << 20
_MOST_DIMENSIONS = 8

Entry = tuple[str, Shape, int, int]
"""Format, shape, and where its bytes begin and end."""


class SafetensorsFile:
    """One file's header, checked against its length, and its bytes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or not 0 < length <= min(size - 8, _MAX_HEADER_BYTES):
                raise load_failed(f"{path}: not a safetensors file, or cut short")
            try:
                header = json.loads(file.read(length), object_pairs_hook=_object)
                self.entries = {name: _entry(name, value) for name, value in header.items() if name != "__metadata__"}
            except (ValueError, AttributeError, RecursionError) as error:
                raise load_failed(f"{path}: the header cannot be read: {error}") from error
        self._start = 8 + length
        self._check(size - self._start)
        self._bytes: Bytes = np.memmap(path, np.uint8, mode="c")  # private: arrays count as writable

    def read(self, name: str) -> tuple[str, Shape, Bytes]:
        """Format, shape and bytes [rows, bytes per row] of a tensor."""
        format_, shape, begin, end = self.entries[name]
        if format_ not in PLAIN_FORMATS:
            raise load_failed(f"{self.path}: tensor {name} has format {format_}; F32, F16 and BF16 can be read")
        rows = shape[0] if len(shape) > 1 else 1
        return format_, shape, self._bytes[self._start + begin : self._start + end].reshape(rows, -1)

    def part(self, name: str) -> Part:
        """A tensor of a quantized matrix."""
        format_, shape, begin, end = self.entries[name]
        if format_ not in TYPES:
            raise load_failed(f"{self.path}: tensor {name} has format {format_}; {', '.join(TYPES)} can be read")
        return Part(format_, shape, self._bytes[self._start + begin : self._start + end])

    def _check(self, size: int) -> None:
        """That tensors fill the bytes behind the header, each its own, without gaps."""
        at, before = 0, "the header"
        for name, (format_, shape, begin, end) in sorted(self.entries.items(), key=lambda item: item[1][2:]):
            what = f"{self.path}: tensor {name} {list(shape)} {format_}"
            if end > size:
                raise load_failed(f"{what} lies beyond the end of the file; it is cut short")
            if begin != at:
                raise load_failed(f"{what} begins at {begin}, expected {at}, where {before} ends")
            if format_ in TYPES and math.prod(shape) * TYPES[format_].itemsize != end - begin:
                raise load_failed(f"{what} does not fill its {end - begin} bytes")
            at, before = end, f"tensor {name}"
        if at != size:
            raise load_failed(f"{self.path}: {size - at} bytes behind the last tensor belong to none")


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """ValueError where a key occurs twice: readers would differ in which one they take."""
    found = dict(pairs)
    if len(found) < len(pairs):
        key, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"{key!r} occurs twice")
    return found


def _entry(name: str, value: Any) -> Entry:
    """ValueError where it is none."""
    match value:
        case {"dtype": str(format_), "shape": [*shape], "data_offsets": [begin, end]}:
            if len(shape) <= _MOST_DIMENSIONS and all(map(_is_size, (*shape, begin, end))) and begin <= end:
                return format_, tuple(shape), begin, end
    raise ValueError(f"tensor {name} is not described by dtype, shape and data_offsets")


def _is_size(number: Any) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and 0 <= number < 1 << 48
