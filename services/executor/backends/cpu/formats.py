"""Formats of packed matrices, as kernels/matmul/format.h defines them, and which of them a stored tensor takes."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

PANEL_ROWS = 32

FORMATS: Mapping[str, int] = MappingProxyType(
    {
        "f32": 0,
        "bf16": 1,
        "q8": 2,
        "q8c": 3,
        "q4g32": 4,
        "q4g64": 5,
        "q4g128": 6,
        "q4mg32": 7,
        "q4mg64": 8,
        "q4mg128": 9,
        "q4k": 10,
        "q6k": 11,
    }
)
"""The kernels' number of each format."""

_BY_PRECISION = ("f32", "bf16", "q8", "q8c", "q4mg32", "q4mg64", "q4mg128", "q4g32", "q4g64", "q4g128")

_NATIVE = {"F32": "f32", "F16": "bf16", "BF16": "bf16", "Q4_0": "q4g32", "Q4_1": "q4mg32", "Q4_K": "q4k", "Q6_K": "q6k"}
"""What stored formats become; all others become q8."""

_NEAREST = {"q4k": "q4mg32", "q6k": "q8"}
"""What takes the place of formats that fit ggml's blocks alone."""


def group_size(format_: str) -> int:
    """Columns of a group, which share a scale; 1 for formats without groups (q8c has one scale a row)."""
    match format_:
        case "f32" | "bf16" | "q8c":
            return 1
        case "q8":
            return 32
        case "q4k" | "q6k":
            return 256
    return int(format_.rpartition("g")[2])


def has_minimum(format_: str) -> bool:
    """Whether groups hold a minimum beside their scale."""
    return format_.startswith("q4m") or format_ == "q4k"


def step_count(format_: str) -> int:
    """Small scales of the parts of a group."""
    return 16 if format_ in _NEAREST else 0


def number_bytes(format_: str) -> int:
    """Bytes of the scales, small scales and minima of one group, 32 rows; 0 for formats without groups."""
    if group_size(format_) == 1:
        return 0
    return (128 if has_minimum(format_) else 64) + step_count(format_) * 32


def group_bytes(format_: str) -> int:
    """Bytes of one group of a format with groups, 32 rows."""
    bits = {"q8": 8, "q6k": 6}.get(format_, 4)
    return group_size(format_) * bits * 4 + number_bytes(format_)


def panel_bytes(format_: str, k: int) -> int:
    """Bytes of 32 rows of k columns, k a multiple of 32 and of the group."""
    match format_:
        case "f32":
            return k * 128
        case "bf16":
            return k * 64
        case "q8c":
            return k * 32 + 128
    return k // group_size(format_) * group_bytes(format_)


def choose(stored: str, wanted: str, run: int) -> str:
    """The format for a tensor stored as `stored`, whose columns come in runs of `run` that padding may follow.

    `wanted` is a key of FORMATS, or auto: quantized tensors keep their bits where a format can, F16 becomes bf16, and
    other quantizations become q8. Groups do not reach over the end of a run: where they would, the nearest format
    whose groups do not.
    """
    format_ = _NATIVE.get(stored, "q8") if wanted == "auto" else wanted
    while run % group_size(format_):
        format_ = _NEAREST.get(format_, "bf16")
    return format_


def more_precise(first: str, second: str) -> str:
    """The format of two tensors that lie in one matrix."""
    if first == second:
        return first
    return min(_NEAREST.get(first, first), _NEAREST.get(second, second), key=_BY_PRECISION.index)
