"""Steps with drafts as credit: within blocks and budget, and right again after each answer."""

from __future__ import annotations

import random
from typing import cast

import pytest

from services.scheduler.sequence import Request, Sequence
from services.scheduler.speculation.credit import answer, fit, grant


def sequence(computed: int, limit: int, slots: int) -> Sequence:
    made = Sequence(cast(Request, None), 0, [1] * (computed + 1), limit, 1 << 30, False)
    made.computed_length = made.projected_length = computed
    made.slots_held = slots
    return made


@pytest.mark.parametrize(
    ("limit", "slots", "steps", "drafts", "expected"),
    [
        (1000, 200, 4, 4, (4, 4)),
        (1000, 119, 4, 4, (3, 4)),  # 19 slots: three steps of up to five tokens
        (1000, 103, 4, 4, (1, 2)),  # what is left goes into one
        (1000, 100, 4, 4, (0, 0)),
        (103, 128, 4, 4, (3, 4)),  # blocks hold all: each step needs one token of the budget at least
        (100, 128, 4, 4, (0, 4)),
        (1000, 102, 4, 0, (2, 0)),
    ],
)
def test_what_fits(limit: int, slots: int, steps: int, drafts: int, expected: tuple[int, int]) -> None:
    assert fit(sequence(100, limit, slots), steps, drafts) == expected


def test_an_answer_gives_back_what_was_not_accepted() -> None:
    one = sequence(100, 1000, 200)
    grant(one, 2, 0)
    grant(one, 3, 4)
    assert (one.projected_length, one.least_length) == (100 + 2 + 15, 105)
    one.granted_steps, one.computed_length = 5 - 3, 100 + 2 + 3  # the first with drafts accepted two
    assert answer(one, 3) == [4]
    assert (one.projected_length, one.least_length) == (105 + 10, 107)
    one.granted_steps, one.computed_length = 0, 107
    assert answer(one, 2) == [4, 4]
    assert one.projected_length == one.computed_length
    assert one.draft_limits == []


def test_books_agree_after_any_grants_and_answers() -> None:
    draw = random.Random(1)
    for _ in range(300):
        one = sequence(draw.randint(1, 50), 120, draw.choice([60, 90, 128]))
        granted: list[int] = []
        while one.computed_length < min(one.length_limit, one.slots_held):
            steps, drafts = fit(one, draw.randint(1, 6), draw.choice([0, 0, 3, 8]))
            if steps > 0:
                grant(one, steps, drafts)
                granted += [drafts] * steps
            answered = draw.randint(min(1, len(granted)), len(granted))
            for limit in granted[:answered]:
                one.computed_length = min(one.length_limit, one.computed_length + 1 + draw.randint(0, limit))
            one.granted_steps -= answered
            limits = answer(one, answered) if one.draft_limits else []
            assert limits == [limit for limit in granted[:answered] if limit]
            granted = granted[answered:]
            assert one.granted_steps == len(granted)
            assert one.computed_length <= one.projected_length <= min(one.length_limit, one.slots_held)
            if one.computed_length == one.length_limit:
                break
