"""Who may take which of an executor's places: the last ones are kept for tenants that hold less than their share. Pure.

Without that, a flood of one tenant holds all places whenever another comes, whose requests then wait until an answer
ends. A tenant that was alone for a while is kept from nothing.
"""

from __future__ import annotations

from collections import Counter

from services.scheduler.fairness import Account
from services.scheduler.state import Executor, Model, State

KEPT_PART = 8
"""One of so many places of an executor is kept; where it has fewer, none."""


def asked_places(state: State, model: Model) -> Counter[Account]:
    """Places that the kvmanager was asked for and has not given yet, by tenant."""
    asked = (asked.sequence for asked in state.asked.values() if asked.model is model)
    return Counter(sequence.request.account for sequence in asked if sequence is not None)


def open_places(model: Model, executors: list[Executor], account: Account, asked: int, now: float) -> list[Executor]:
    """Those of the executors with a place for a tenant that has asked for so many already."""
    free = [executor for executor in executors if executor.free_sequences > 0]
    places = sum(executor.max_sequences for executor in executors)
    if account.running_count + asked < places * model.ledger.share(account, now):
        return free
    return [executor for executor in free if executor.free_sequences > executor.max_sequences // KEPT_PART]
