"""Rows of packed words, and how they go into the lanes of panels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.executor.backends.cpu.formats import group_bytes, group_size, number_bytes, step_count
from services.executor.models.weights import Bytes

UInt32 = NDArray[np.uint32]
Words = NDArray[np.uint32 | np.uint8]
Scales = NDArray[np.floating[Any]]
Steps = NDArray[np.uint8 | np.int8]


class UnfitWeights(Exception):
    """Weights that cannot be packed, with what is wrong with them."""


@dataclass(frozen=True, slots=True)
class EncodedRows:
    """Rows of a matrix in a packed format, not yet interleaved with those of their panel (or with words that are)."""

    words: Words | None  # [rows, groups, words of a group], of f8 bytes; formats without groups have one
    scales: Scales | None = None  # [rows, groups] fp16; of q8c [rows, 1] and of f8 [rows, blocks] fp32
    minima: Scales | None = None  # [rows, groups] fp16
    steps: Steps | None = None  # [rows, groups, small scales of a group]
    zeros: NDArray[np.int8] | None = None  # [rows, groups]
    rounded: int = 0  # given scales that the format does not hold exactly

    def __post_init__(self) -> None:
        for numbers in (self.scales, self.minima):
            if numbers is not None and not np.isfinite(numbers).all():
                raise UnfitWeights("holds NaN or infinity, or values beyond the reach of fp16 scales")


def write_rows(format_: str, panels: Bytes, lanes: slice, rows: EncodedRows) -> None:
    """Fills `lanes` of panels [P, bytes of a panel] with P times as many rows as there are lanes."""
    words, numbers, steps = _parts(format_, panels, 0 if rows.words is None else rows.words[0].nbytes * 32)
    if rows.words is not None:
        _interleave(words.view(rows.words.dtype), lanes, rows.words)
    if rows.steps is not None:
        _interleave(steps, lanes, rows.steps.view(np.uint8))
    for start, values in ((0, rows.scales), (32, rows.minima), (64, rows.zeros)):
        if values is not None:
            by_group = values.reshape(len(values), numbers.shape[1], -1)
            place = slice(start, start + 32 * by_group.shape[2])
            _interleave(numbers.view(values.dtype)[..., place], lanes, by_group)


def _parts(format_: str, panels: Bytes, word_bytes: int) -> tuple[Bytes, Bytes, Bytes]:
    """The bytes [P, groups, bytes] of words, of scales, minima and zero points, and of small scales."""
    if group_size(format_) == 1:
        return panels[:, None, :word_bytes], panels[:, None, word_bytes:], panels[:, None, :0]
    groups = panels.reshape(len(panels), -1, group_bytes(format_))
    size, small = number_bytes(format_), step_count(format_) * 32
    if small:
        return groups[..., size:], groups[..., : size - small], groups[..., size - small : size]
    return groups[..., :-size], groups[..., -size:], groups[..., :0]


def _interleave(target: NDArray[Any], lanes: slice, rows: NDArray[Any]) -> None:
    """Rows [n, groups, count] into `lanes` of target [P, groups, count * 32]."""
    count, groups, _ = target.shape
    lanes_of = target.reshape(count, groups, -1, 32)
    lanes_of[..., lanes] = rows.reshape(count, -1, *rows.shape[1:]).transpose(0, 2, 3, 1)
