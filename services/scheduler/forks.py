"""Forks: new sequences that begin with the KV of one that runs. Who decides that one is needed is no matter here."""

from __future__ import annotations

from services.scheduler.lifecycle import enqueue
from services.scheduler.sequence import Sequence
from services.scheduler.state import State
from services.scheduler.stays import Origin


def origin_of(parent: Sequence) -> Origin | None:
    """All that a sequence has computed; None where it holds nothing."""
    if parent.executor is None:
        return None
    return Origin(parent.executor, parent.sequence_id, parent.computed_length)


def fork(state: State, origin: Origin | None, sequence: Sequence) -> bool:
    """Lets a new sequence go on from there; its last token lies beyond. Whether it is asked for with the next message.

    It goes before whoever waits, for it continues what was let in already; where it finds no room it waits as well. Its
    parent may leave before that message: its blocks are given back later.
    """
    sequence.preempted = True  # should it have to wait
    sequence.origin = origin
    if origin is not None and state.kv_connected and origin.executor.takes:
        asking = sum(other.origin is not None and other.origin.executor is origin.executor for other in state.forks)
        if origin.executor.free_sequences > asking:
            state.forks.append(sequence)
            return True
    enqueue(state, sequence)
    return False
