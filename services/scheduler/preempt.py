"""Who gives up its blocks when they run out, and what becomes of its content. Never the only one running.

The victim is a path of beam search that waits for others of its search, before a held sequence, then one of the lowest
priority, then one of the tenant that was served most for its share, then one whose blocks are cheap to restore, then
the newest. Its full blocks go to a lower tier where bringing them back takes less than computing them anew (the choice
of Kwon et al., 2023, made by measured rates); otherwise they stay cached until others need the room.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from quire.v1 import types_pb2
from services.scheduler.lifecycle import leave, requeue
from services.scheduler.reserve import QUIET_RETRY_SECONDS
from services.scheduler.sequence import Sequence
from services.scheduler.state import TARGET_GROUP, Executor, State

COST_STEPS = 4
"""Costs are told apart by quarters of what computing a block takes: finer differences are chance."""


@dataclass(frozen=True, slots=True)
class Restoring:
    """What it takes to have a sequence's content back once others used its blocks."""

    freed_blocks: int  # those that nobody else holds
    compute_seconds: float
    load_seconds: float | None  # None where there is no lower tier

    @property
    def seconds(self) -> float:
        """The cheaper way."""
        return self.compute_seconds if self.load_seconds is None else min(self.compute_seconds, self.load_seconds)

    @property
    def swaps(self) -> bool:
        """Whether loading is cheaper than computing."""
        return self.load_seconds is not None and self.load_seconds < self.compute_seconds


def choose_victim(executor: Executor) -> tuple[Sequence, Restoring] | None:
    """The sequence that yields, and what it will take to restore it; None where it would be the only one."""
    if len(executor.running) < 2:
        return None
    holders = Counter(block for s in executor.running.values() for block in _blocks(s))
    block_seconds = executor.step_time.prefill(executor.block_size)

    def cheapness(found: tuple[Sequence, Restoring]) -> tuple[bool, bool, int, float, int, int, int]:
        sequence, restoring = found
        request = sequence.request
        per_block = restoring.seconds / max(restoring.freed_blocks, 1) / block_seconds
        cost, served = round(COST_STEPS * per_block), request.account.virtual_time
        return (sequence.rests, request.held, -request.priority, served, -cost, request.arrival, sequence.choice)

    candidates = [(sequence, restoring(executor, sequence, holders)) for sequence in executor.running.values()]
    return max([found for found in candidates if found[1].freed_blocks] or candidates, key=cheapness)


def restoring(executor: Executor, sequence: Sequence, holders: Counter[int]) -> Restoring:
    """`holders` counts the sequences that hold a block: what others hold as well neither comes free nor is lost."""
    blocks, size = _blocks(sequence), executor.block_size
    shared = sum(holders[block] > 1 for block in blocks)
    lost = max(sequence.computed_length - shared * size, 0)
    compute = executor.step_time.prefill(lost)
    bytes_each = _swapped_block_bytes(executor)
    if bytes_each is None:
        return Restoring(len(blocks) - shared, compute, None)
    full, rest = divmod(lost, size)
    load = executor.tier_rate.move(full * bytes_each) + executor.step_time.prefill(rest)
    return Restoring(len(blocks) - shared, compute, load)


def is_stuck(executor: Executor) -> bool:
    """Whether a sequence that was refused blocks can be granted nothing more, and none are on their way back."""
    return (
        bool(executor.starved)
        and not executor.leaving
        and not executor.has_space
        and not executor.coming_blocks
        and any(s.projected_length >= s.slots_held for s in executor.starved.values())
        and not any(_will_shrink(s) for s in executor.running.values())
    )


def preempt(state: State, executor: Executor, now: float) -> Sequence | None:
    """Sends the victim back to the front of the queue where a sequence is stuck. One at a time: it may be enough."""
    if not is_stuck(executor):
        return None
    found = choose_victim(executor)
    if found is not None:
        victim, restored = found
        stay = victim.sequence_id
        leave(state, victim)
        if restored.swaps and stay in executor.leaving:
            executor.leaving[stay].returns = True
        requeue(state, victim)
        executor.counters.preemptions += 1
        return victim
    model = state.models.get(executor.model.name) if executor.model is not None else None
    if model is not None and model.retry_at is None:
        model.retry_at = now + QUIET_RETRY_SECONDS  # others hold the blocks, and may return them unannounced
    return None


def _will_shrink(sequence: Sequence) -> bool:
    """Whether what is granted makes some of its blocks colder."""
    stay = sequence.stay
    return stay is not None and stay.changes_between(sequence.computed_length, sequence.projected_length)


def _blocks(sequence: Sequence) -> list[int]:
    return sequence.stay.blocks.get(TARGET_GROUP, []) if sequence.stay is not None else []


def _swapped_block_bytes(executor: Executor) -> int | None:
    """Bytes of a block in a lower tier; None where there is none, or formats go by age: those stay on the device."""
    description = executor.description
    if description is None or description.kv_policy:
        return None
    lower = (pool for pool in description.pools if pool.tier != types_pb2.TIER_DEVICE)
    return next((pool.block_bytes for pool in lower if pool.group_id == TARGET_GROUP), None)
