"""Steps that may verify drafts, as credit: how many fit, and how far a sequence can have come by then. Pure.

Such a step yields 1 to 1 + k tokens. `projected_length` is the most that unanswered steps can make of a sequence: its
blocks must hold that. `least_length` is the least: its budget must leave a token for each step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from services.scheduler.sequence import Sequence


def fit(sequence: Sequence, steps: int, drafts: int) -> tuple[int, int]:
    """Of so many further steps with so many drafts each, what the sequence's budget and blocks have room for."""
    steps = min(steps, sequence.length_limit - sequence.least_length)
    if sequence.slots_held >= sequence.length_limit:
        return steps, drafts  # blocks hold all that it can become
    room = sequence.slots_held - sequence.projected_length
    if steps * (1 + drafts) <= room:
        return steps, drafts
    if room > drafts:
        return room // (1 + drafts), drafts
    return (1, room - 1) if room > 0 else (0, 0)


def grant(sequence: Sequence, steps: int, drafts: int) -> None:
    """Notes steps that are granted."""
    if drafts and not sequence.draft_limits:
        sequence.draft_limits = [0] * sequence.granted_steps
    if sequence.draft_limits or drafts:
        sequence.draft_limits += [drafts] * steps
    sequence.granted_steps += steps
    sequence.projected_length = min(sequence.length_limit, sequence.projected_length + steps * (1 + drafts))


def answer(sequence: Sequence, steps: int) -> list[int]:
    """Notes that the first of the unanswered steps are answered, the rest of the sequence's state being up to date.

    Returns the draft limits of those that had any.
    """
    limits = sequence.draft_limits
    answered = [limit for limit in limits[:steps] if limit]
    del limits[:steps]
    if any(limits):
        most = sequence.least_length + sum(limits)
        sequence.projected_length = min(sequence.length_limit, most)
    else:
        limits.clear()
        sequence.projected_length = min(sequence.length_limit, sequence.least_length)
    return answered
