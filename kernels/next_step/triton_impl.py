"""One program for some sequences: there are few, and each is a handful of numbers."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.next_step import DecodeState

SEQUENCES = 128


@triton.jit(do_not_specialize=["count"])
def feed_back_kernel(
    tokens, positions, slots, contexts, draws, tables, drawn, count, block_size, stride_table, N: tl.constexpr
):  # fmt: skip
    i = tl.program_id(0) * N + tl.arange(0, N)
    mask = i < count
    position = tl.load(positions + i, mask=mask, other=0) + 1
    block = tl.load(tables + i.to(tl.int64) * stride_table + position // block_size, mask=mask, other=0).to(tl.int64)
    tl.store(tokens + i, tl.maximum(tl.load(drawn + i, mask=mask, other=0), 0).to(tl.int64), mask=mask)
    tl.store(positions + i, position, mask=mask)
    tl.store(slots + i, block * block_size + position % block_size, mask=mask)
    tl.store(contexts + i, tl.load(contexts + i, mask=mask, other=0) + 1, mask=mask)
    tl.store(draws + i, tl.load(draws + i, mask=mask, other=0) + 1, mask=mask)


def feed_back(state: DecodeState, drawn: Tensor, count: int, block_size: int) -> None:
    """As kernels.next_step.feed_back, which has checked the arguments."""
    if count:
        feed_back_kernel[(triton.cdiv(count, SEQUENCES),)](
            state.tokens, state.positions, state.slots, state.contexts, state.draws, state.tables, drawn, count,
            block_size, state.tables.stride(0), N=SEQUENCES, num_warps=1,
        )  # fmt: skip
