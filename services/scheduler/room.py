"""How much prefill an executor has room for: in a step, and waiting for its steps. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator

from services.scheduler.sequence import Sequence
from services.scheduler.state import Executor, Model, State

CHUNKS_IN_FLIGHT = 2
"""Steps ahead for which prefill is granted."""


def step_budget(state: State, executor: Executor) -> int:
    """The most tokens that one step of this executor may compute."""
    description = executor.description
    assert description is not None
    limit = description.max_step_tokens
    return min(limit, state.limits.step_tokens or limit)


def prefill_room(state: State, executor: Executor, budget: int) -> int:
    """Tokens of prefill in one step, at least one.

    A quarter of the budget, however many sequences decode. Beside those a step is the gap between two of their tokens:
    measured times say how much prefill goes into it.
    """
    decodes = len(executor.decoding)
    drafts = executor.drafts_per_step
    room = max(budget - decodes - math.ceil(drafts), budget // 4, 1)
    if not decodes:
        return room
    limits = state.limits
    chunk = executor.step_time.chunk(decodes, limits.gap_stretch, limits.gap_seconds, executor.gap_target, drafts)
    return min(room, chunk)


def queued_tokens(executor: Executor) -> int:
    """Known tokens that wait there to be granted."""
    return sum(len(sequence.token_ids) - sequence.projected_length for sequence in executor.prefilling.values())


def asked_sequences(state: State, model: Model) -> Iterator[Sequence]:
    """A model's sequences that the kvmanager was asked to place and has not answered."""
    sequences = (asked.sequence for asked in state.asked.values() if asked.model is model)
    return (sequence for sequence in sequences if sequence is not None)


def asked_tokens(state: State, model: Model) -> int:
    """Tokens of those sequences."""
    return sum(len(sequence.token_ids) for sequence in asked_sequences(state, model))


def queue_room(state: State, executor: Executor) -> int:
    """Tokens that may still be placed there to wait: as many as are granted ahead, so that no step lacks any.

    What is placed is computed first come, first served. So all else stays in the queue, where whoever is next is next.
    """
    return CHUNKS_IN_FLIGHT * prefill_room(state, executor, step_budget(state, executor)) - queued_tokens(executor)
