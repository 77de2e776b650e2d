"""Reads safetensors files as mapped memory, without a tensor library: bf16 has no numpy type."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from services.executor.models.weights import PLAIN_FORMATS, Bytes, Shape, load_failed
from services.executor.quant.parts import TYPES, Part

_MAX_HEADER_BYTES = 100 << 20


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
                header: dict[str, Any] = json.loads(file.read(length))
                self.entries = {name: _entry(value) for name, value in header.items() if name != "__metadata__"}
            except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
                raise load_failed(f"{path}: the header cannot be read: {error}") from error
        self._start = 8 + length
        for name, (format_, shape, begin, end) in self.entries.items():
            if not 0 <= begin <= end or self._start + end > size:
                raise load_failed(f"{path}: tensor {name} lies beyond the end of the file; it is cut short")
            if format_ in TYPES and (
                min(shape, default=0) < 0 or math.prod(shape) * TYPES[format_].itemsize != end - begin
            ):
                raise load_failed(
                    f"{path}: tensor {name} {list(shape)} {format_} does not fill its {end - begin} bytes"
                )
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


def _entry(value: dict[str, Any]) -> tuple[str, Shape, int, int]:
    begin, end = value["data_offsets"]
    return str(value["dtype"]), tuple(int(n) for n in value["shape"]), int(begin), int(end)
