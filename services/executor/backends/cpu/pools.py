"""Block ids as the native code takes them: a format, and a place in that format's pool."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from services.executor.backends.base import Int32

FORMATS = ("f32", "bf16", "int8", "int4")
"""A format's number is its place."""


class Pools:
    """The pools that ids count through, one after the other."""

    def __init__(self, starts: Sequence[int], formats: Sequence[str]) -> None:
        """First ids of each pool, then the end; a format of FORMATS each."""
        self._formats = formats
        self._starts = np.array(starts[:-1], np.int32)
        self._numbers = np.array([FORMATS.index(name) for name in formats], np.uint8)

    def split(self, block_ids: Int32) -> tuple[Int32, NDArray[np.uint8] | None]:
        """Places and numbers of formats, shaped like the ids; no formats where there is one pool."""
        if len(self._starts) == 1:
            return block_ids, None
        pools = self._pools_of(block_ids)
        return block_ids - self._starts[pools], self._numbers[pools]

    def runs(self, pairs: Sequence[tuple[int, int]]) -> Iterator[tuple[str, str, Int32]]:
        """Pairs (source, target) in order, cut where formats change: both formats, and places [n, 2]."""
        ids = np.array(pairs, np.int32).reshape(-1, 2)
        pools = self._pools_of(ids)
        places = ids - self._starts[pools]
        ends = [*(np.flatnonzero((pools[1:] != pools[:-1]).any(1)) + 1).tolist(), len(ids)]
        for start, end in itertools.pairwise([0, *ends]):
            source, target = pools[start].tolist()
            yield self._formats[source], self._formats[target], places[start:end]

    def _pools_of(self, block_ids: Int32) -> NDArray[np.intp]:
        found: NDArray[np.intp] = np.zeros(block_ids.shape, np.intp)
        for start in self._starts[1:]:
            found += block_ids >= start
        return found
