"""Matrices of 4 bits whose codes stay packed: what is only put in another order need not become bytes in between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from kernels import _native
from services.executor.quant.bits import UInt32
from services.executor.quant.matrix import Float32, Int16

BITS = 4
COLUMNS = 8
"""Of a word."""


@dataclass(frozen=True, slots=True)
class NibbleMatrix:
    """A `GroupedMatrix` of 4 bits, eight columns of a row in a word, from the low bits up."""

    words: UInt32  # [K / 8, N]
    scales: Float32  # [N, G]
    zeros: Int16  # [N, G]

    def take_rows(self, rows: NDArray[np.integer]) -> NibbleMatrix:
        return replace(self, words=self.words.take(rows, axis=1), scales=self.scales[rows], zeros=self.zeros[rows])


def aligned(words: UInt32) -> UInt32:
    """The same as native code can read them: words of a row side by side, none across the bounds of words in memory."""
    is_ready = words.flags.aligned and words.strides[1] == words.itemsize
    return words if is_ready else np.require(np.ascontiguousarray(words), requirements="A")


def turn_eights(words: UInt32, rows: Sequence[int]) -> UInt32:
    """Words [K, n] of eight rows for each column as words [K / 8, 8 n] of eight columns; nibble i is row `rows[i]`."""
    out = np.empty((len(words) // COLUMNS, words.shape[1] * 8), np.uint32)
    _native.turn_nibbles(aligned(words), out, rows)
    return out
