"""Reads a GGUF file's header, quickly: the gguf package's reader takes seconds on a large vocabulary."""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from services.executor.models.ggml_formats import format_of
from services.executor.models.weights import load_failed

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Value types that `struct` reads, by the file's number for them."""
_STRING, _ARRAY = 8, 9
_UINT32 = 4
_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 32

# More than any model has: what memory a header takes must not be what it says it has.
_MOST_FIELDS = _MOST_TENSORS = 1 << 16
_MOST_DIMENSIONS = 4
_MOST_ELEMENTS = 1 << 22
_MOST_LETTERS = 1 << 24


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

    Raises MODEL_LOAD_FAILED where the file is not GGUF 2 or 3, is cut short, names unknown types or contradicts itself.
    """
    size = path.stat().st_size
    if size < 24:
        raise load_failed(f"{path}: not a GGUF file, or cut short")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data[:4] != b"GGUF":
            raise load_failed(f"{path}: not a GGUF file")
        try:
            header = _Cursor(data, arrays).header()
        except (struct.error, ValueError, OverflowError) as error:
            raise load_failed(f"{path}: the header cannot be read, or is cut short: {error}") from error
    _check_places(path, header, size)
    return header


def _check_places(path: Path, header: GgufHeader, size: int) -> None:
    """That tensors lie in the file, none in another."""
    end, before = 0, ""
    for name, info in sorted(header.tensors.items(), key=lambda item: (item[1].offset, item[1].byte_count)):
        what = f"{path}: tensor {name} {list(info.shape)} {info.format} of {info.byte_count} bytes"
        if info.offset + info.byte_count > size:
            raise load_failed(f"{what} lies beyond the end of the file; it is cut short")
        if info.offset < end:
            raise load_failed(f"{what} begins at {info.offset}, before tensor {before} ends at {end}")
        end, before = info.offset + info.byte_count, name


class _Cursor:
    """Walks the header once, front to back."""

    def __init__(self, data: mmap.mmap, arrays: Literal["all", "none"]) -> None:
        self._data, self._at, self._arrays = data, 4, arrays

    def header(self) -> GgufHeader:
        version = self._number("I")
        if version not in (2, 3):
            raise ValueError(f"GGUF version {version} is not supported")
        tensor_count = self._count("Q", _MOST_TENSORS, "tensors")
        field_count = self._count("Q", _MOST_FIELDS, "fields")
        fields: dict[str, Any] = {}
        for _ in range(field_count):
            name = self._new_name(fields, "field")
            kind = self._number("I")
            if name == "general.alignment" and kind != _UINT32:
                raise ValueError(f"{name} has value type {kind}, expected {_UINT32}")
            fields[name] = self._value(kind)
        alignment = fields.get("general.alignment", _ALIGNMENT)
        if alignment < 8 or alignment & (alignment - 1):
            raise ValueError(f"general.alignment is {alignment}, expected a power of two from 8 on")
        tensors: dict[str, TensorInfo] = {}
        for _ in range(tensor_count):
            name = self._new_name(tensors, "tensor")
            tensors[name] = self._tensor_info(name, alignment)
        base = -(-self._at // alignment) * alignment
        return GgufHeader(fields, {name: replace(info, offset=base + info.offset) for name, info in tensors.items()})

    def _tensor_info(self, name: str, alignment: int) -> TensorInfo:
        """Its offset counts from where the header ends."""
        dimensions = self._count("I", _MOST_DIMENSIONS, f"dimensions of tensor {name}")
        shape = tuple(reversed([self._number("Q") for _ in range(dimensions)]))
        try:
            kind = format_of(self._number("I"))
        except ValueError as error:
            raise ValueError(f"tensor {name} {list(shape)}: {error}") from error
        columns = shape[-1] if shape else 1
        if columns % kind.values:
            raise ValueError(
                f"tensor {name}: {columns} columns are no multiple of the {kind.name} block of {kind.values}"
            )
        offset = self._number("Q")
        if offset % alignment:
            raise ValueError(f"tensor {name} {list(shape)} {kind.name} begins at {offset}, no multiple of {alignment}")
        row_bytes = columns // kind.values * kind.bytes
        return TensorInfo(shape, kind.name, offset, row_bytes, row_bytes * math.prod(shape[:-1]))

    def _new_name(self, known: Mapping[str, Any], what: str) -> str:
        name = self._string()
        if name in known:
            raise ValueError(f"{what} {name} occurs twice")
        return name

    def _count(self, code: str, most: int, what: str) -> int:
        count: int = self._number(code)
        if count > most:
            raise ValueError(f"{count} {what}; at most {most} can be read")
        return count

    def _value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise ValueError(f"value type {kind} is not known")
        element, count = self._number("I"), self._count("Q", _MOST_ELEMENTS, "elements of an array")
        if element in _SCALARS:
            layout = f"<{count}{_SCALARS[element]}"
            start = self._advance(struct.calcsize(layout))
            return list(struct.unpack_from(layout, self._data, start)) if self._arrays == "all" else []
        if element != _STRING:
            raise ValueError(f"arrays of value type {element} are not known")
        if self._arrays == "none":
            self._skip_strings(count)
            return []
        return [self._string() for _ in range(count)]

    def _skip_strings(self, count: int) -> None:
        data, at, length = self._data, self._at, _LENGTH.unpack_from
        for _ in range(count):  # a hundred thousand of them
            at += 8 + length(data, at)[0]
        if at > len(data):
            raise ValueError(f"strings that end at {at} lie beyond the end")
        self._at = at

    def _string(self) -> str:
        length = self._count("Q", _MOST_LETTERS, "letters")
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
