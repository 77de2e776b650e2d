"""Tokens fed back."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernels.next_step import DecodeState, feed_back


def cases() -> dict[str, Callable[[], object]]:
    long, whole = torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int32)
    state = DecodeState(long, long, long, whole, whole, torch.zeros(3, 8, dtype=torch.int32))
    return {"feed back": lambda: feed_back(state, whole, 3, 16)}
