"""GPTQ checkpoints, as AutoGPTQ and GPTQModel store them.

`qweight` int32 [words of K, N] packs each column's codes, `qzeros` int32 [G, words of N] the zero points, `scales` is
[G, N], and `g_idx` [K] names each column's group. Codes are packed without gaps: of 3 bits, some cross a word's end.

Zero points are stored one lower (`checkpoint_format` gptq) or as they are (gptq_v2). GPTQModel, where it writes the
former, subtracts a constant from whole words: a zero point of 0 borrows from its neighbour, and its constants for 3
bits are not ones at the fields' places. Of a symmetric checkpoint the zero points themselves tell which it was.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from services.executor.models.weights import QuantizedTensor, load_failed
from services.executor.quant import nibbles
from services.executor.quant.bits import UInt32, pack_bits, unpack_bits, unpack_window, word_count
from services.executor.quant.groups import group_count, group_index, group_width
from services.executor.quant.matrix import Float32, GroupedFormat, GroupedMatrix, Int16
from services.executor.quant.nibbles import NibbleMatrix
from services.executor.quant.parts import FLOATS, Part, StoredLayer
from services.executor.quant.scheme import Label, choice, flag, integer, pattern

BITS = (2, 3, 4, 8)
PARTS = frozenset(("qweight", "qzeros", "scales", "g_idx"))

ZeroFormat = Literal["gptq", "gptq_v2"]

_GPTQMODEL_STEPS: Mapping[int, tuple[int, ...]] = MappingProxyType(
    {2: (0x55555555,), 3: (0x24924924, 0x92492492, 0x49249249), 4: (0x11111111,), 8: (0x01010101,)}
)
"""What GPTQModel adds to each word of `qzeros`, in turn."""

ZeroReader = Callable[[UInt32, int, int, int], Int16]
"""From words [G, W]: zero points [G, stop - start] of that many bits, from a row on, to another."""


def _as_stored(words: UInt32, bits: int, start: int, stop: int) -> Int16:
    return unpack_window(words, bits, start, stop).astype(np.int16)


def _one_lower(words: UInt32, bits: int, start: int, stop: int) -> Int16:
    return _as_stored(words, bits, start, stop) + np.int16(1)


def _words_lower(words: UInt32, bits: int, start: int, stop: int) -> Int16:
    steps = np.resize(np.array(_GPTQMODEL_STEPS[bits], np.uint32), words.shape[1])
    return _as_stored(words + steps, bits, start, stop)


@dataclass(frozen=True, slots=True)
class _Settings:
    """What the label says of one matrix."""

    bits: int
    group_size: int
    is_ordered: bool
    is_symmetric: bool

    @classmethod
    def of(cls, label: Label) -> _Settings:
        return cls(
            integer(label, "bits", choices=BITS),
            integer(label, "group_size"),
            flag(label, "desc_act") or False,
            flag(label, "sym") or False,
        )


class GptqScheme:
    """All matrices of a GPTQ checkpoint; GPTQModel's `dynamic` rules give some of them settings of their own."""

    def __init__(self, label: Label) -> None:
        self._label = label
        self._settings = _Settings.of(label)
        self._rules = _rules(label.get("dynamic") or {})
        stored = choice(label, "checkpoint_format", ("gptq", "gptq_v2"), "gptq")
        lower = (_words_lower, _one_lower) if _writer(label) == "gptqmodel" else (_one_lower, _words_lower)
        self._readers: tuple[ZeroReader, ...] = (_as_stored, *lower) if stored == "gptq_v2" else (*lower, _as_stored)

    def open(self, layer: StoredLayer) -> QuantizedTensor:
        layer.check_parts(PARTS)
        rows, columns = layer.shape
        settings = self._settings_for(layer)
        bits, width = settings.bits, group_width(layer, settings.group_size)
        groups = group_count(columns, width)
        words = layer.part("qweight", ("I32",), (word_count(columns, bits), rows)).array().view(np.uint32)
        scales = layer.part("scales", FLOATS, (groups, rows))
        zero_words = layer.part("qzeros", ("I32",), (groups, word_count(rows, bits))).array().view(np.uint32)
        index = group_index(layer, "g_idx", width, is_needed=settings.is_ordered)
        read_zeros, is_symmetric = self._zero_reader(layer, zero_words, settings)

        def numbers(start: int, stop: int) -> tuple[Float32, Int16]:
            own = scales.floats(slice(None), slice(start, stop)).T
            return np.ascontiguousarray(own), np.ascontiguousarray(read_zeros(zero_words, bits, start, stop).T)

        def read(start: int, stop: int) -> GroupedMatrix:
            codes = unpack_bits(words[:, start:stop].T, bits, columns)
            return GroupedMatrix(bits, codes, *numbers(start, stop), width, index)

        def read_nibbles(start: int, stop: int) -> NibbleMatrix:
            return NibbleMatrix(words[:, start:stop], *numbers(start, stop))

        format_ = GroupedFormat(bits, width, is_symmetric, index is not None)
        can_stay = bits == nibbles.BITS and columns % nibbles.COLUMNS == 0
        return QuantizedTensor(layer.name, layer.shape, format_, read, read_nibbles=read_nibbles if can_stay else None)

    def _settings_for(self, layer: StoredLayer) -> _Settings:
        """Those of the first rule that matches."""
        for rule, own in self._rules:
            if rule.match(layer.module):
                if own is None:
                    raise layer.refused("is stored quantized, but the label's dynamic rules leave it as it is")
                return _Settings.of({**self._label, **own})
        return self._settings

    def _zero_reader(self, layer: StoredLayer, words: UInt32, settings: _Settings) -> tuple[ZeroReader, bool]:
        """How zero points are stored, and whether all are in the middle.

        A label that says symmetric is checked, and tells which of the ways it was.
        """
        middle = 1 << (settings.bits - 1)
        for reader in self._readers:
            if (reader(words, settings.bits, 0, layer.shape[0]) == middle).all():
                return reader, True
            if not settings.is_symmetric:
                return reader, False
        raise layer.refused(f"sym is stated, but zero points differ from {middle}, or are not stored as expected")


def label(
    bits: int, group_size: int, *, is_symmetric: bool, is_ordered: bool, zero_format: ZeroFormat
) -> dict[str, Any]:
    """The `quantization_config` of matrices that `pack` wrote."""
    return {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group_size,
        "desc_act": is_ordered,
        "sym": is_symmetric,
        "checkpoint_format": zero_format,
        "lm_head": False,
    }


def pack(matrix: GroupedMatrix, zero_format: ZeroFormat) -> dict[str, Part]:
    """The inverse of reading. ValueError where a scale is not exact in fp16, or a zero point cannot be stored so.

    `gptq` has no zero point 0 that all readers understand; and of 3 bits, GPTQModel misreads it: `gptq_v2` has neither
    fault.
    """
    least = 1 if zero_format == "gptq" else 0
    if matrix.zeros.min() < least or matrix.zeros.max() >= 1 << matrix.bits:
        raise ValueError(f"zero points {matrix.zeros.min()} to {matrix.zeros.max()} cannot be stored as {zero_format}")
    zeros = (matrix.zeros - np.int16(least)).astype(np.uint8)
    return {
        "qweight": Part.of("I32", pack_bits(matrix.codes, matrix.bits).T.view(np.int32)),
        "qzeros": Part.of("I32", pack_bits(zeros.T, matrix.bits).view(np.int32)),
        "scales": Part.of_floats("F16", np.ascontiguousarray(matrix.scales.T)),
        "g_idx": Part.of("I32", matrix.column_groups()),
    }


def _rules(dynamic: Any) -> list[tuple[re.Pattern[str], Label | None]]:
    """Patterns of module names with the settings that replace the common ones; None for matrices that stay plain."""
    if not isinstance(dynamic, dict) or not all(isinstance(own, dict) for own in dynamic.values()):
        raise load_failed(f"quantization_config: dynamic is {dynamic!r}, expected settings by pattern")
    return [
        (pattern("dynamic", key, "-:"), None) if key.startswith("-:") else (pattern("dynamic", key, "+:"), own)
        for key, own in dynamic.items()
    ]


def _writer(label: Label) -> str:
    """The program that wrote the checkpoint, as `meta` names it."""
    meta = label.get("meta")
    named = meta.get("quantizer") if isinstance(meta, dict) else None
    first = named[0] if isinstance(named, list) and named else named
    return str(first).partition(":")[0].lower()
