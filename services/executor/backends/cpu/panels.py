"""Rows of packed words, and how they go into the lanes of panels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.executor.backends.cpu.formats import group_bytes, group_size, has_minimum
from services.executor.models.weights import Bytes

UInt32 = NDArray[np.uint32]
Scales = NDArray[np.floating[Any]]


class UnfitWeights(Exception):
    """Weights that cannot be packed, with what is wrong with them."""


@dataclass(frozen=True, slots=True)
class EncodedRows:
    """Rows of a matrix in a packed format, not yet interleaved with those of their panel."""

    words: UInt32  # [rows, groups, words of a group]; formats without groups have one
    scales: Scales | None = None  # [rows, groups] fp16, of q8c fp32
    minima: Scales | None = None  # [rows, groups] fp16
    clamped: int = 0  # values that the format cannot hold and that took the nearest one it can

    def __post_init__(self) -> None:
        for numbers in (self.scales, self.minima):
            if numbers is not None and not np.isfinite(numbers).all():
                raise UnfitWeights("holds NaN or infinity, or values beyond the reach of fp16 scales")


def write_rows(format_: str, panels: Bytes, lanes: slice, rows: EncodedRows) -> None:
    """Fills `lanes` of panels [P, bytes of a panel] with P times as many rows as there are lanes."""
    count = len(panels)
    if format_ == "q8c":
        groups, numbers = panels[:, None, :-128], panels[:, None, -128:].view(np.float32)
    elif group_size(format_) == 1:
        groups, numbers = panels[:, None], None
    else:
        cut = group_bytes(format_) - (128 if has_minimum(format_) else 64)
        split = panels.reshape(count, -1, group_bytes(format_))
        groups, numbers = split[..., :cut], split[..., cut:].view(np.float16)
    _, group_count, word_count = rows.words.shape
    words = groups.view(np.uint32).reshape(count, group_count, word_count, 32)
    words[..., lanes] = rows.words.reshape(count, -1, group_count, word_count).transpose(0, 2, 3, 1)
    for start, values in ((0, rows.scales), (32, rows.minima)):
        if values is not None and numbers is not None:
            numbers[..., start + lanes.start : start + lanes.stop] = values.reshape(count, -1, group_count).swapaxes(
                1, 2
            )
