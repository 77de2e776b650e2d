"""Which step may be begun before the last one's tokens reach the host, and whether it was the right one. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from services.executor.backends.base import Int32, StepInputs
from services.executor.backends.cuda.draws import Draws, same_changes_next


def may_go_on(inputs: StepInputs, draws: Draws, context_length: int) -> bool:
    """Whether the next step is likely that of the tokens drawn in this one, and its blocks are there."""
    if inputs.room is None or inputs.layers or inputs.prompt_scores or draws.masks is not None or draws.allowed:
        return False
    sequences = len(inputs.context_lengths)
    if len(inputs.token_ids) != sequences or len(draws.rows) != sequences or draws.drafts is not None:
        return False
    if int(inputs.context_lengths.max()) >= context_length or not same_changes_next(draws.samples):
        return False
    room = inputs.room()
    return room is not None and bool((inputs.context_lengths < room).all())


def goes_on(before: StepInputs, drawn: Sequence[int], now: StepInputs, block_size: int) -> bool:
    """Whether `now` is the decode step after `before`, of all its sequences and the tokens that it drew."""
    if now.masks is not None or now.prompt_scores or now.layers or len(now.samples) != len(before.samples):
        return False
    for row, (sample, earlier) in enumerate(zip(now.samples, before.samples, strict=True)):
        if sample is not earlier or sample.draft_ids or sample.first_place or sample.row != row:
            return False
    return (
        np.array_equal(now.token_ids, drawn)
        and np.array_equal(now.query_starts, before.query_starts)
        and np.array_equal(now.positions, before.positions + 1)
        and np.array_equal(now.context_lengths, before.context_lengths + 1)
        and _same_blocks(before.block_tables, now.block_tables, -(-now.context_lengths // block_size))
    )


def _same_blocks(before: Int32, now: Int32, needed: Int32) -> bool:
    """Whether both tables name the same `needed` [S] first blocks."""
    most = int(needed.max())
    if before.shape[1] < most or now.shape[1] < most:
        return False
    differs = before[:, :most] != now[:, :most]
    return not bool((differs & (np.arange(most) < needed[:, None])).any())
