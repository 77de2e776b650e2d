"""Steps that may verify drafts, as credit: how many fit, and how far a sequence can have come by then. Pure.

Such a step yields 1 to 1 + k tokens. `least_length` is the least that unanswered steps can make of a sequence: its
budget must leave a token for each. Drafts have a credit of their own: so many may be accepted in all, and its blocks
must hold those beside the steps. So however many are, each step that is granted has its slot. Blocks are asked for
ahead of what is likely, by what was accepted of late.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from services.common.speculation import MAX_DRAFT_TOKENS

if TYPE_CHECKING:
    from services.scheduler.sequence import Sequence

GAIN_STEPS = 8
"""Steps that the drafts accepted of late are taken from."""
LUCK = 2.0
"""So many times as many as of late may be accepted without any want of blocks."""


def fit(sequence: Sequence, steps: int, drafts: int, spare: int = 0) -> tuple[int, int]:
    """Of so many further steps with so many drafts each, what the sequence's budget and blocks have room for.

    No drafts where no credit is left for them. `spare` is that of `grant`.
    """
    least = sequence.least_length
    steps = min(steps, sequence.length_limit - least)
    if sequence.slots_held >= sequence.length_limit:
        return steps, drafts  # blocks hold all that it can become
    room, limits, credit = sequence.slots_held - least, sum(sequence.draft_limits), sequence.draft_credit
    has_credit = credit > 0 or room - steps > spare
    if drafts and has_credit and steps + min(credit, limits + steps * drafts) <= room:
        return steps, drafts
    return min(steps, room - min(credit, limits)), 0


def grant(sequence: Sequence, steps: int, drafts: int, spare: int) -> int:
    """Notes steps that are granted; returns the credit of drafts that goes with them.

    `spare`: slots that are left for later steps, where blocks do not hold all that the sequence can become.
    """
    if drafts and not sequence.draft_limits:
        sequence.draft_limits = [0] * sequence.granted_steps
    if sequence.draft_limits or drafts:
        sequence.draft_limits += [drafts] * steps
    sequence.granted_steps += steps
    credit = 0
    if drafts:
        most = sum(sequence.draft_limits)
        if sequence.slots_held < sequence.length_limit:
            most = min(most, sequence.slots_held - sequence.least_length - spare)
        credit = max(0, most - sequence.draft_credit)
        sequence.draft_credit += credit
    _project(sequence)
    return credit


def answer(sequence: Sequence, steps: int, accepted: int) -> list[int]:
    """Notes that the first of the unanswered steps are answered, the rest of the sequence's state being up to date.

    Returns the draft limits of those that had any.
    """
    limits = sequence.draft_limits
    answered = [limit for limit in limits[:steps] if limit]
    del limits[:steps]
    if not any(limits):
        limits.clear()
    sequence.draft_credit -= accepted
    _project(sequence)
    return answered


def _project(sequence: Sequence) -> None:
    drafts = min(sequence.draft_credit, sum(sequence.draft_limits))
    sequence.projected_length = min(sequence.length_limit, sequence.least_length + drafts)


def learn(sequence: Sequence, steps: int, accepted: int) -> None:
    """Takes in how many drafts steps that admitted some had accepted in all."""
    habit = sequence.habit
    habit.gain += (accepted / steps - habit.gain) * min(1.0, steps / GAIN_STEPS)


def likely_drafts(sequence: Sequence, limit: int) -> int:
    """Drafts of a step, of so many admitted, that blocks are asked for."""
    return min(limit, math.ceil(LUCK * sequence.habit.gain))


def likely_length(sequence: Sequence) -> int:
    """How far unanswered steps are likely to bring a sequence."""
    if not sequence.draft_limits:
        return sequence.projected_length
    drafts = likely_drafts(sequence, MAX_DRAFT_TOKENS)
    return sequence.least_length + sum([limit if limit < drafts else drafts for limit in sequence.draft_limits])
