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
        "q4zg32": 12,
        "q4zg64": 13,
        "q4zg128": 14,
        "f8": 15,
    }
)
"""The kernels' number of each format."""

F8_BLOCK = 128
"""Columns of f8 that share a scale; the last ones may be fewer."""

_BY_PRECISION = ("f32", "bf16", "q8", "q8c", "q4mg32", "q4mg64", "q4mg128", "q4zg32", "q4zg64", "q4zg128",
                 "q4g32", "q4g64", "q4g128")  # fmt: skip

_NATIVE = {"F32": "f32", "F16": "bf16", "BF16": "bf16", "Q4_0": "q4g32", "Q4_1": "q4mg32", "Q4_K": "q4k", "Q6_K": "q6k"}
"""What stored formats become; all others become q8."""

_NEAREST = {"q4k": "q4mg32", "q6k": "q8", "f8": "q8"}
"""What takes the place of formats that fit ggml's blocks or e4m3 alone."""


def group_size(format_: str) -> int:
    """Columns of a group, whose numbers lie beside it; 1 for formats without groups (q8c has one scale a row)."""
    match format_:
        case "f32" | "bf16" | "q8c" | "f8":
            return 1
        case "q8":
            return 32
        case "q4k" | "q6k":
            return 256
    return int(format_.rpartition("g")[2])


def has_minimum(format_: str) -> bool:
    """Whether groups hold a minimum beside their scale."""
    return format_.startswith("q4m") or format_ == "q4k"


def has_zero(format_: str) -> bool:
    """Whether groups hold a zero point beside their scale."""
    return format_.startswith("q4z")


def step_count(format_: str) -> int:
    """Small scales of the parts of a group."""
    return 16 if format_ in ("q4k", "q6k") else 0


def number_bytes(format_: str) -> int:
    """Bytes of the scales, small scales, minima and zero points of one group, 32 rows; 0 for formats without groups."""
    if group_size(format_) == 1:
        return 0
    return (128 if has_minimum(format_) else 96 if has_zero(format_) else 64) + step_count(format_) * 32


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
        case "f8":
            return k * 32 + -(-k // F8_BLOCK) * 128
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
    if first.startswith(("q4g", "q4z")) and second.startswith(("q4g", "q4z")):
        kind = "q4zg" if has_zero(first) or has_zero(second) else "q4g"
        return f"{kind}{min(group_size(first), group_size(second))}"
    return min(_NEAREST.get(first, first), _NEAREST.get(second, second), key=_BY_PRECISION.index)
