"""A prompt as one vector: states of its tokens, added up chunk by chunk, then brought to length 1."""

from __future__ import annotations

import numpy as np

from quire.v1.types_pb2 import Pooling
from services.common.errors import QuireError, Reason
from services.executor.backends.base import PooledRows


class Embedding:
    """Of one sequence, whose whole prompt is computed here."""

    def __init__(self, pooling: Pooling.ValueType, prompt_length: int, size: int) -> None:
        """`pooling` is not POOLING_UNSPECIFIED; `size` is that of the model's states."""
        self._pooling, self._prompt_length = pooling, prompt_length
        self._total = np.zeros(size, np.float64)

    def rows(self, first_row: int, start: int, count: int) -> PooledRows | None:
        """What a step adds that computes tokens [start, start + count) from flattened row `first_row` on."""
        if self._pooling == Pooling.POOLING_MEAN:
            return PooledRows(first_row, count, self._total)
        if start + count < self._prompt_length:
            return None
        return PooledRows(first_row + count - 1, 1, self._total)

    def vector(self) -> list[float]:
        """The vector [size] once all is computed. NOT_FINITE where it has no direction."""
        length = float(np.linalg.norm(self._total))  # that of the mean is another by a factor alone
        if not 0 < length < np.inf:
            raise QuireError(Reason.NOT_FINITE, "the model's states are not finite, or all zero")
        found: list[float] = (self._total / length).tolist()
        return found
