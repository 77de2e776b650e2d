"""Reads a GGUF file's header, quickly: the gguf package's reader takes seconds on a large vocabulary."""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from services.executor.models.ggml_formats import format_of
from services.executor.models.weights import load_failed

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Value types that `struct` reads, by the file's number for them."""
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 32


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies. The shape is [rows, columns]; GGUF itself writes it reversed."""

    shape: tuple[int, ...]
    format: str  # a name of ggml_formats
    offset: int  # bytes from the start of the file
    row_bytes: int
    byte_count: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    fields: dict[str, Any]
    tensors: dict[str, TensorInfo]


def read_header(path: Path, *, arrays: Literal["all", "none"] = "all") -> GgufHeader:
    """Metadata and tensor places. With `arrays` none, arrays (a vocabulary, say) read as empty lists.

    Raises MODEL_LOAD_FAILED where the file is not GGUF 2 or 3, is cut short, or names unknown types.
    """
    size = path.stat().st_size
    if size < 24:
        raise load_failed(f"{path}: not a GGUF file, or cut short")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data[:4] != b"GGUF":
            raise load_failed(f"{path}: not a GGUF file")
        try:
            header = _Cursor(data, arrays).header()
        except (struct.error, ValueError, KeyError) as error:
            raise load_failed(f"{path}: the header cannot be read, or is cut short: {error}") from error
    for name, info in header.tensors.items():
        if info.offset + info.byte_count > size:
            raise load_failed(f"{path}: tensor {name} lies beyond the end of the file; it is cut short")
    return header


class _Cursor:
    """Walks the header once, front to back."""

    def __init__(self, data: mmap.mmap, arrays: Literal["all", "none"]) -> None:
        self._data, self._at, self._arrays = data, 4, arrays

    def header(self) -> GgufHeader:
        version = self._number("I")
        if version not in (2, 3):
            raise ValueError(f"GGUF version {version} is not supported")
        tensor_count, field_count = self._number("Q"), self._number("Q")
        fields = {}
        for _ in range(field_count):
            name = self._string()
            fields[name] = self._value(self._number("I"))
        infos = [self._tensor_info() for _ in range(tensor_count)]
        alignment = int(fields.get("general.alignment", _ALIGNMENT))
        base = math.ceil(self._at / alignment) * alignment
        tensors = {name: TensorInfo(shape, kind, base + offset, *sizes) for name, shape, kind, offset, sizes in infos}
        return GgufHeader(fields, tensors)

    def _tensor_info(self) -> tuple[str, tuple[int, ...], str, int, tuple[int, int]]:
        name = self._string()
        reversed_shape = [self._number("Q") for _ in range(self._number("I"))]
        kind = format_of(self._number("I"))
        columns = reversed_shape[0] if reversed_shape else 1
        if columns % kind.values:
            raise ValueError(
                f"tensor {name}: {columns} columns are no multiple of the {kind.name} block of {kind.values}"
            )
        row_bytes = columns // kind.values * kind.bytes
        shape = tuple(reversed(reversed_shape))
        return name, shape, kind.name, self._number("Q"), (row_bytes, row_bytes * math.prod(shape[:-1]))

    def _value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise ValueError(f"value type {kind} is not known")
        element, count = self._number("I"), self._number("Q")
        if element in _SCALARS:
            layout = f"<{count}{_SCALARS[element]}"
            start = self._advance(struct.calcsize(layout))
            return list(struct.unpack_from(layout, self._data, start)) if self._arrays == "all" else []
        if element == _STRING and self._arrays == "none":
            self._skip_strings(count)
            return []
        return [self._value(element) for _ in range(count)]

    def _skip_strings(self, count: int) -> None:
        data, at, length = self._data, self._at, _LENGTH.unpack_from
        for _ in range(count):  # a hundred thousand of them
            at += 8 + length(data, at)[0]
        self._at = at

    def _string(self) -> str:
        length = self._number("Q")
        start = self._advance(length)
        return self._data[start : start + length].decode("utf-8", errors="replace")

    def _number(self, code: str) -> Any:
        layout = "<" + code
        value = struct.unpack_from(layout, self._data, self._at)[0]
        self._at += struct.calcsize(layout)
        return value

    def _advance(self, count: int) -> int:
        start = self._at
        if start + count > len(self._data):
            raise ValueError(f"{count} bytes at {start} lie beyond the end")
        self._at += count
        return start
