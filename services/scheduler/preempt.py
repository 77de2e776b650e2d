"""Who gives up its blocks when they run out, and what becomes of its content. Never the only one running.

The victim is a path of beam search that waits for others of its search, before a held sequence, then one of the lowest
priority, then one of the tenant that was served most for its share, then one whose blocks are cheap to restore, then
the newest. Its full blocks go to a lower tier where bringing them back takes less than computing them anew (the choice
of Kwon et al., 2023, made by measured rates); otherwise they stay cached until others need the room.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from quire.v1 import types_pb2
from services.scheduler.lifecycle import leave, requeue
from services.scheduler.reserve import QUIET_RETRY_SECONDS
from services.scheduler.sequence import Sequence
from services.scheduler.state import TARGET_GROUP, Executor, State

COST_STEPS = 4
"""Costs are told apart by quarters of what computing a block takes: finer differences are chance."""
COMING_SECONDS = 1.0
"""Blocks that come free once their content is in a lower tier are waited for while one arrives within so long."""


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


def choose_victim(
    executor: Executor, candidates: Iterable[Sequence] | None = None
) -> tuple[Sequence, Restoring] | None:
    """The sequence that yields, of the candidates or of all, and what it will take to restore it.

    None where there is no candidate, or it would be the only one that runs.
    """
    if len(executor.running) < 2:
        return None
    running = executor.running.values()
    holders = Counter(block for s in running for block in _blocks(s))
    block_seconds = executor.step_time.prefill(executor.block_size)

    def cheapness(found: tuple[Sequence, Restoring]) -> tuple[bool, bool, int, float, int, int, int]:
        sequence, restoring = found
        request = sequence.request
        per_block = restoring.seconds / max(restoring.freed_blocks, 1) / block_seconds
        cost, served = round(COST_STEPS * per_block), request.account.virtual_time
        return (sequence.rests, request.held, -request.priority, served, -cost, request.arrival, sequence.choice)

    choices = [(s, restoring(executor, s, holders)) for s in (running if candidates is None else candidates)]
    return max([found for found in choices if found[1].freed_blocks] or choices, key=cheapness, default=None)


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


def is_stuck(executor: Executor, now: float) -> bool:
    """Whether a sequence that was refused blocks can be granted nothing more, and none are on their way back.

    Moves to a lower tier that have stood still for long are not counted on.
    """
    return (
        bool(executor.starved)
        and not executor.leaving
        and not executor.has_space
        and not (executor.coming_blocks and now < executor.coming_at + COMING_SECONDS)
        and any(_is_full(s) for s in executor.starved.values())
        and not any(_will_shrink(s) for s in executor.running.values())
    )


def _is_full(sequence: Sequence) -> bool:
    """Whether its blocks hold no further step, whatever becomes of drafts that are not answered yet."""
    length = sequence.least_length if sequence.draft_limits else sequence.projected_length
    return length >= sequence.slots_held


def preempt(state: State, executor: Executor, now: float) -> Sequence | None:
    """Sends the victim back to the front of the queue where a sequence is stuck. One at a time: it may be enough."""
    if not is_stuck(executor, now):
        if executor.coming_blocks:
            _look_again(state, executor, now + COMING_SECONDS)
        return None
    found = choose_victim(executor)
    if found is None:  # others hold the blocks, and may return them unannounced
        _look_again(state, executor, now + QUIET_RETRY_SECONDS)
        return None
    yield_place(state, executor, found, now, f"{executor.target} has run out of KV blocks")
    return found[0]


def yield_place(state: State, executor: Executor, found: tuple[Sequence, Restoring], now: float, occasion: str) -> None:
    """Sends a sequence that `choose_victim` found back to the front of the queue. `occasion` says what it yields to."""
    victim, restored = found
    stay = victim.sequence_id
    state.decisions.note(now, "preempted", victim, f"{occasion}; {_reason(victim, restored)}")
    leave(state, victim)
    if restored.swaps and not executor.coming_blocks and stay in executor.leaving:
        executor.leaving[stay].returns = True
    requeue(state, victim)
    executor.counters.preemptions += 1


def _reason(victim: Sequence, restored: Restoring) -> str:
    """What made it the one that yields, in the order in which that counts."""
    request = victim.request
    if victim.rests:
        return "it waits for the other paths of its search"
    if request.held:
        return "its client holds it"
    way = "loaded" if restored.swaps else "computed"
    return (
        f"its priority is {request.priority}, its tenant was served {request.account.virtual_time:,.0f}, and "
        f"{restored.freed_blocks} blocks come free, {way} again in {1000 * restored.seconds:.1f} ms"
    )


def _look_again(state: State, executor: Executor, at: float) -> None:
    """Lets starved sequences ask once more at that time, unless something is due sooner."""
    model = state.models.get(executor.model.name) if executor.model is not None else None
    if model is not None and model.retry_at is None:
        model.retry_at = at


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
