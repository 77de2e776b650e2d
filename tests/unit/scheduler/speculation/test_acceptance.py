"""What is expected of drafts is what became of them, by position and by sequence."""

from __future__ import annotations

import random

import pytest

from services.common.speculation import MAX_DRAFT_TOKENS
from services.scheduler.speculation.acceptance import EDGES, KINDS, Acceptance, Depths, Habit


def test_positions_are_told_apart() -> None:
    """Half of all first drafts are right, and then nine of ten; limits change, and few or none may be proposed."""
    depths, draw = Depths(), random.Random(1)
    for _ in range(20_000):
        limit = draw.randint(1, 8)
        proposed = 0 if draw.random() < 0.4 else draw.randint(max(1, limit - 2), limit)
        accepted = 0
        while accepted < proposed and draw.random() < (0.9 if accepted else 0.5):
            accepted += 1
        depths.add(limit, proposed, accepted)
    proposed_at, accepted_at = depths.expect(0.1)
    assert proposed_at[0] == pytest.approx(0.6, abs=0.05)
    assert accepted_at[0] == pytest.approx(0.3, abs=0.04)
    for position in range(1, 6):
        chance = accepted_at[position] / accepted_at[position - 1]
        proposing = proposed_at[position] / proposed_at[position - 1]
        assert chance / proposing == pytest.approx(0.9, abs=0.06)
    assert accepted_at == sorted(accepted_at, reverse=True)
    assert proposed_at == sorted(proposed_at, reverse=True)


def test_what_was_never_admitted_is_like_the_position_before() -> None:
    depths = Depths()
    for _ in range(200):
        depths.add(2, 2, 2)
    proposed_at, accepted_at = depths.expect(0.5)
    assert len(proposed_at) == len(accepted_at) == MAX_DRAFT_TOKENS
    assert accepted_at[15] > 0.8
    assert proposed_at == [pytest.approx(1.0)] * MAX_DRAFT_TOKENS


def test_sequences_are_sorted_by_what_became_of_theirs() -> None:
    acceptance, draw = Acceptance(), random.Random(1)
    habits = {chance: Habit(8) for chance in (0.05, 0.5, 0.99)}
    for _ in range(200):
        for chance, habit in habits.items():
            accepted = 0
            while accepted < 4 and draw.random() < chance:
                accepted += 1
            acceptance.add(habit, 4, 4, accepted)
    kinds = [habit.kind for habit in habits.values()]
    assert kinds == sorted(set(kinds))
    assert kinds[0] <= 1
    assert kinds[-1] == KINDS - 1
    assert 3 <= kinds[1] <= 6


def test_a_sequence_that_comes_is_like_the_others() -> None:
    acceptance, old = Acceptance(), Habit(8)
    for _ in range(2000):
        acceptance.add(old, 4, 4, 0)
    assert acceptance.meet(Habit(8)) == 0
    assert acceptance.overall < EDGES[0]


def test_nothing_proposed_says_nothing_of_acceptance() -> None:
    acceptance, habit = Acceptance(), Habit(8)
    before = acceptance.meet(habit)
    for _ in range(100):
        acceptance.add(habit, 4, 0, 0)
    assert habit.kind == before
    assert acceptance.kinds[before].expect(0.5)[0][0] < 0.1
