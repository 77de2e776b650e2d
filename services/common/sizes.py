"""Sizes of memory as people write them."""

from __future__ import annotations

import re

_UNITS = {"": 1, "B": 1} | {f"{unit}IB": 1 << (10 * power) for power, unit in enumerate("KMGT", 1)}
_UNITS |= {f"{unit}B": 1000**power for power, unit in enumerate("KMGT", 1)}


def parse_size(text: str) -> int:
    """Bytes from "2GiB", "500MB" or "1073741824". Raises ValueError."""
    match = re.fullmatch(r"(\d{1,18}(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError(f"{text!r} is no size such as 2GiB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def format_size(size: float) -> str:
    """For people: 1536 is "1.5 KiB"."""
    unit = 0
    while size >= 1024 and unit < 4:
        size, unit = size / 1024, unit + 1
    return f"{size:.4g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[unit]}"
