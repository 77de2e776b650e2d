"""Makes the inputs of the next decode step of the tokens that the last one drew, without leaving the GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.next_step.reference import feed_back_plainly

__all__ = ["DecodeState", "feed_back", "feed_back_plainly"]


@dataclass(frozen=True, slots=True)
class DecodeState:
    """What a decode step reads of S sequences, a token each; changed in place."""

    tokens: Tensor  # [S] int64
    positions: Tensor  # [S] int64, of the tokens
    slots: Tensor  # [S] int64: where their keys and values go
    contexts: Tensor  # [S] int32: tokens with KV after the step
    draws: Tensor  # [S] int32: the output position that is drawn
    tables: Tensor  # [S, any] int32: blocks of each sequence


def feed_back(state: DecodeState, drawn: Tensor, count: int, block_size: int) -> None:
    """Goes on with drawn [S] int32 for the first `count` sequences; the others stay as they are, on a GPU.

    Where nothing could be drawn (-1), token 0 takes its place: who reads the results knows. The table must name a
    block for each next position. ValueError where the parts do not fit each other.
    """
    expected = {"tokens": torch.int64, "positions": torch.int64, "slots": torch.int64, "contexts": torch.int32,
                "draws": torch.int32}  # fmt: skip
    for name, dtype in expected.items():
        part: Tensor = getattr(state, name)
        if part.dim() != 1 or len(part) < count or part.dtype != dtype:
            raise ValueError(f"feed_back of {count}: {name} is {list(part.shape)} {part.dtype}, not {dtype}")
    if drawn.dtype != torch.int32 or drawn.dim() != 1 or len(drawn) < count:
        raise ValueError(f"feed_back of {count} from {list(drawn.shape)} {drawn.dtype}")
    if state.tables.dim() != 2 or state.tables.dtype != torch.int32 or len(state.tables) < count:
        raise ValueError(f"feed_back of {count} by tables {list(state.tables.shape)} {state.tables.dtype}")
    from kernels.next_step import triton_impl

    triton_impl.feed_back(state, drawn, count, block_size)
