"""Steps with drafts as credit: within blocks and budget, and right again after each answer."""

from __future__ import annotations

import random
from typing import cast

import pytest

from services.scheduler.sequence import Request, Sequence
from services.scheduler.speculation.credit import answer, fit, grant, learn, likely_drafts, likely_length


def sequence(computed: int, limit: int, slots: int) -> Sequence:
    made = Sequence(cast(Request, None), 0, [1] * (computed + 1), limit, 1 << 30, False)
    made.computed_length = made.projected_length = computed
    made.slots_held = slots
    return made


@pytest.mark.parametrize(
    ("limit", "slots", "credit", "steps", "drafts", "expected"),
    [
        (1000, 200, 0, 4, 4, (4, 4)),
        (1000, 106, 0, 4, 4, (4, 0)),  # two slots are spare: no credit for drafts, so there are none
        (1000, 107, 0, 4, 4, (4, 4)),
        (1000, 107, 3, 4, 4, (4, 4)),  # three slots are those of drafts,
        (1000, 106, 3, 4, 4, (4, 0)),  # which the steps need: only where drafts are admitted they may be taken
        (1000, 103, 3, 4, 4, (3, 0)),
        (1000, 100, 0, 4, 4, (0, 0)),
        (103, 128, 0, 4, 4, (3, 4)),  # blocks hold all: each step needs one token of the budget at least
        (100, 128, 0, 4, 4, (0, 4)),
        (1000, 102, 0, 4, 0, (2, 0)),
    ],
)
def test_what_fits(limit: int, slots: int, credit: int, steps: int, drafts: int, expected: tuple[int, int]) -> None:
    one = sequence(100, limit, slots)
    one.draft_credit = credit
    assert fit(one, steps, drafts, 2) == expected


def test_drafts_have_a_credit_of_their_own_within_the_blocks() -> None:
    one = sequence(100, 1000, 120)
    assert grant(one, 8, 16, 4) == 8  # of 20 slots, less eight steps and four spare ones
    assert (one.projected_length, one.least_length) == (116, 108)
    assert fit(one, 4, 16, 4) == (4, 16)
    assert fit(one, 5, 16, 4) == (4, 0)
    assert grant(one, 2, 16, 4) == 0
    assert one.projected_length == 118
    one.slots_held = 152
    assert grant(one, 2, 16, 4) == 152 - 112 - 4 - 8
    assert one.draft_credit == 36


def test_blocks_that_hold_all_bound_no_drafts() -> None:
    """Near the end of the budget steps are granted that accepted drafts make needless."""
    one = sequence(100, 104, 128)
    assert fit(one, 8, 16, 4) == (4, 16)
    assert grant(one, 4, 16, 4) == 64
    assert one.projected_length == one.least_length == 104


def test_blocks_are_asked_for_by_what_was_accepted_of_late() -> None:
    one = sequence(100, 1000, 500)
    grant(one, 8, 16, 0)
    assert (likely_drafts(one, 16), likely_length(one)) == (0, 108)
    learn(one, 2, 8)  # four a step, in a quarter of the steps that count
    assert likely_drafts(one, 16) == 2
    for _ in range(40):
        learn(one, 4, 16)
    assert (likely_drafts(one, 16), likely_drafts(one, 5)) == (8, 5)
    assert likely_length(one) == 108 + 8 * 8
    for _ in range(40):
        learn(one, 4, 64)
    assert likely_length(one) == 108 + 8 * 16
    for _ in range(40):
        learn(one, 4, 0)
    assert likely_drafts(one, 16) <= 1


def test_an_answer_gives_back_what_was_not_accepted() -> None:
    one = sequence(100, 1000, 200)
    assert grant(one, 2, 0, 8) == 0
    assert grant(one, 3, 4, 8) == 12
    assert (one.projected_length, one.least_length) == (100 + 2 + 15, 105)
    one.granted_steps, one.computed_length = 5 - 3, 100 + 2 + 3  # the first with drafts accepted two
    assert answer(one, 3, 2) == [4]
    assert (one.projected_length, one.least_length) == (105 + 10, 107)
    one.granted_steps, one.computed_length = 0, 107
    assert answer(one, 2, 0) == [4, 4]
    assert one.projected_length == one.computed_length
    assert one.draft_limits == []
    assert grant(one, 3, 4, 8) == 2  # ten were kept


def test_books_agree_after_any_grants_and_answers() -> None:
    draw = random.Random(1)
    for _ in range(300):
        one = sequence(draw.randint(1, 50), 120, draw.choice([60, 90, 128]))
        granted: list[int] = []
        credit = 0
        while one.computed_length < min(one.length_limit, one.slots_held):
            spare = draw.randint(0, 6)
            steps, drafts = fit(one, draw.randint(1, 6), draw.choice([0, 0, 3, 8]), spare)
            if steps > 0:
                credit += grant(one, steps, drafts, spare)
                granted += [drafts] * steps
            if not granted:
                one.slots_held += 4
                continue
            answered, accepted = draw.randint(1, len(granted)), 0
            for limit in granted[:answered]:
                most = min(limit, credit - accepted, one.length_limit - one.computed_length - 1)
                took = draw.randint(0, max(0, most))
                accepted += took
                one.computed_length = min(one.length_limit, one.computed_length + 1 + took)
            credit -= accepted
            one.granted_steps -= answered
            limits = answer(one, answered, accepted)
            assert limits == [limit for limit in granted[:answered] if limit]
            granted = granted[answered:]
            assert one.granted_steps == len(granted)
            assert one.draft_credit == credit >= 0
            if one.computed_length == one.length_limit:
                break
            assert one.computed_length <= one.projected_length <= min(one.length_limit, one.slots_held)
            assert one.slots_held >= one.length_limit or one.least_length <= one.slots_held
