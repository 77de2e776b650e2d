"""The same from plain operations."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from kernels.next_step import DecodeState


def feed_back_plainly(state: DecodeState, drawn: Tensor, count: int, block_size: int) -> None:
    """As kernels.next_step.feed_back, on any device."""
    positions = state.positions[:count] + 1
    blocks = state.tables[:count].gather(1, (positions // block_size)[:, None])[:, 0].to(torch.int64)
    state.tokens[:count] = drawn[:count].clamp(min=0)
    state.positions[:count] = positions
    state.slots[:count] = blocks * block_size + positions % block_size
    state.contexts[:count] += 1
    state.draws[:count] += 1
