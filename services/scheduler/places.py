"""Who may take which of an executor's places: the last ones are kept for tenants that hold less than their share. Pure.

Without that, a flood of one tenant holds all places whenever another comes, whose requests then wait until an answer
ends. A tenant that was alone for a while is kept from nothing.
"""

from __future__ import annotations

from collections import Counter

from services.scheduler.fairness import Account
from services.scheduler.room import asked_sequences
from services.scheduler.sequence import Sequence
from services.scheduler.state import Executor, Model, State

BELOW_SHARE = "what is left is not for the tenant that is next; this one holds fewer places than its share"
KEPT_PART = 8
"""One of so many places of an executor is kept; where it has fewer, none."""


def asked_places(state: State, model: Model) -> Counter[Account]:
    """Places that the kvmanager was asked for and has not given yet, by tenant."""
    return Counter(sequence.request.account for sequence in asked_sequences(state, model))


def takes_place(
    model: Model, head: Sequence, executors: list[Executor], asked: Counter[Account], now: float, prompt_speed: float
) -> tuple[Sequence, list[Executor]] | None:
    """Who gets a place of these executors, which have some, and where; None where they wait for others to come.

    `head` is next. Where all that is left is not for its tenant, the next tenant of its class is asked. What none of
    those who wait may have, though not all are of one tenant, is `head`'s: it would stand idle.
    """
    account = head.request.account
    if found := _open_to(model, account, executors, asked[account], now):
        return head, found
    other = model.queue.peek_beside(account, now, prompt_speed)
    if other is not None:
        own = other.request.account
        if found := _open_to(model, own, executors, asked[own], now):
            return other, found
    is_alone = len(model.queue) <= account.queued_count - asked[account]
    return None if is_alone else (head, executors)


def _open_to(model: Model, account: Account, executors: list[Executor], asked: int, now: float) -> list[Executor]:
    """Those of the executors with a place for a tenant that has asked for so many already."""
    places = sum(executor.max_sequences for executor in executors)
    if account.running_count + asked < places * model.ledger.share(account, now):
        return executors
    return [executor for executor in executors if executor.free_sequences > executor.max_sequences // KEPT_PART]
