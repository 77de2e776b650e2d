"""Who gives up its blocks when they run out: the least urgent, newest sequence, and never the only one running."""

from __future__ import annotations

from services.scheduler.lifecycle import leave, requeue
from services.scheduler.reserve import QUIET_RETRY_SECONDS
from services.scheduler.sequence import Sequence
from services.scheduler.state import Executor, State


def choose_victim(running: list[Sequence]) -> Sequence | None:
    """Paths of beam search that rest first, then held sequences, then by lowest priority, then the newest."""
    if len(running) < 2:
        return None

    def cheapness(sequence: Sequence) -> tuple[bool, bool, int, int, int]:
        request = sequence.request
        return (sequence.rests, request.held, -request.priority, request.arrival, sequence.choice)

    return max(running, key=cheapness)


def is_stuck(executor: Executor) -> bool:
    """Whether a sequence that was refused blocks can be granted nothing more, and none are on their way back."""
    return (
        bool(executor.starved)
        and not executor.leaving
        and not executor.has_space
        and any(s.projected_length >= s.slots_held for s in executor.starved.values())
        and not any(_will_shrink(s) for s in executor.running.values())
    )


def _will_shrink(sequence: Sequence) -> bool:
    """Whether what is granted makes some of its blocks colder."""
    stay = sequence.stay
    return stay is not None and stay.changes_between(sequence.computed_length, sequence.projected_length)


def preempt(state: State, executor: Executor, now: float) -> Sequence | None:
    """Sends the victim back to the front of the queue where a sequence is stuck. One at a time: it may be enough."""
    if not is_stuck(executor):
        return None
    victim = choose_victim(list(executor.running.values()))
    if victim is not None:
        leave(state, victim)
        requeue(state, victim)
        executor.counters.preemptions += 1
        return victim
    model = state.models.get(executor.model.name) if executor.model is not None else None
    if model is not None and model.retry_at is None:
        model.retry_at = now + QUIET_RETRY_SECONDS  # others hold the blocks, and may return them unannounced
    return None
