"""Columns of rows by number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.executor.backends.cpu.layout import Int32


@dataclass(frozen=True, slots=True)
class Gather:
    """Which columns to take, found out once for many rows."""

    columns: NDArray[np.intp] | None  # None: all, as they are
    padding: NDArray[np.bool_] | None  # places [k] that become zeros; None: there are none

    @classmethod
    def of(cls, source: Int32, width: int) -> Gather:
        """Of rows of `width`; -1 is a column of zeros."""
        if np.array_equal(source, np.arange(width)):
            return cls(None, None)
        is_padding = source < 0
        return cls(np.where(is_padding, 0, source).astype(np.intp), is_padding if is_padding.any() else None)

    def take(self, values: NDArray[Any]) -> NDArray[Any]:
        """From values [n, width], contiguous [n, k]."""
        if self.columns is None:
            return np.ascontiguousarray(values)
        taken: NDArray[Any] = values.take(self.columns, axis=1, mode="clip")  # in range, and faster so
        if self.padding is not None:
            taken[:, self.padding] = 0
        return taken
