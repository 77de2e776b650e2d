"""The formats of packed matrices, as kernels/matmul/format.h defines them."""

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
    }
)
"""Numbers by name. Ordered by the room that a weight takes, widest first."""
