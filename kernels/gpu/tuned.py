"""Tuned configurations of kernels, from tables by GPU and shape; without a table, or an entry in it, the default holds.

A table is `tables/<GPU's name in lower case, other characters as _>.json`: for each kernel a list of entries. An
entry's "shape" gives a value, or the least and the greatest, of some dimensions; the first that fits is taken, and its
"config" replaces fields of the default:

    {"paged_attention": [{"shape": {"head_size": 128, "rows": [1, 16]}, "config": {"tile": 64, "warps": 4}}]}
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from kernels.gpu.device import Gpu

TABLES = Path(__file__).with_name("tables")

Config = TypeVar("Config")
_TRIED: ContextVar[tuple[str, Mapping[str, int]] | None] = ContextVar("tried", default=None)


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of a table."""

    shape: Mapping[str, tuple[int, int]]
    config: Mapping[str, int]

    def fits(self, shape: Mapping[str, int]) -> bool:
        """Whether all dimensions that the entry names lie in its ranges. ValueError for one that the kernel lacks."""
        if unknown := set(self.shape) - set(shape):
            raise ValueError(f"a tuned configuration asks for {sorted(unknown)}; the kernel has {sorted(shape)}")
        return all(low <= shape[name] <= high for name, (low, high) in self.shape.items())


def tuned(kernel: str, gpu: Gpu, default: Config, shape: Mapping[str, int], tables: Path = TABLES) -> Config:
    """The dataclass `default`, with what the GPU's table says of this kernel at this shape."""
    tried = _TRIED.get()
    if tried is not None and tried[0] == kernel:
        return replace(default, **tried[1])  # type: ignore[type-var]
    for entry in read_table(tables / f"{table_name(gpu.name)}.json").get(kernel, ()):
        if entry.fits(shape):
            return replace(default, **entry.config)  # type: ignore[type-var]
    return default


@contextmanager
def override(kernel: str, config: Mapping[str, int]) -> Iterator[None]:
    """Inside, this kernel's default has these fields, whatever the table says: for who tunes it."""
    token = _TRIED.set((kernel, config))
    try:
        yield
    finally:
        _TRIED.reset(token)


def table_name(gpu_name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", gpu_name.lower()).strip("_")


@cache
def read_table(path: Path) -> Mapping[str, Sequence[Entry]]:
    """All entries by kernel; none where there is no such file. ValueError naming what is wrong."""
    if not path.exists():
        return {}
    try:
        return {kernel: [_entry(item) for item in items] for kernel, items in json.loads(path.read_text()).items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path.name} is no table of tuned configurations: {error!r}") from error


def _entry(item: Mapping[str, Any]) -> Entry:
    shape = {}
    for name, limits in item["shape"].items():
        low, high = (limits, limits) if isinstance(limits, int) else limits
        shape[name] = (int(low), int(high))
    return Entry(shape, {name: int(value) for name, value in item["config"].items()})
