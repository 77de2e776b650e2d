"""The curve follows what is measured, and a slower machine moves all of it."""

from __future__ import annotations

import random

import pytest

from services.scheduler.speculation.cost import StepCost


def curve(tokens: float) -> float:
    return 0.003 if tokens <= 1 else 0.004 + 0.0002 * tokens


def test_what_is_measured_is_learned() -> None:
    cost, draw = StepCost(0.01, 0.001), random.Random(1)
    for _ in range(3000):
        tokens = draw.choice((1, 2, 4, 8, 16, 48))
        cost.observe([(5, tokens)], 5 * curve(tokens) * draw.uniform(0.95, 1.05))
    for tokens in (1, 2, 4, 8, 16, 48):
        assert cost.step(tokens) == pytest.approx(curve(tokens), rel=0.05)
    assert cost.step(12) == pytest.approx(curve(12), rel=0.1)


def test_steps_of_two_kinds_in_one_message_are_told_apart() -> None:
    """Most steps are plain, a few verify eight drafts."""
    cost = StepCost(0.003, 0.001)
    for _ in range(1000):
        cost.observe([(7, 1), (2, 9)], 7 * curve(1) + 2 * curve(9))
        cost.observe([(9, 1)], 9 * curve(1))
    assert cost.step(1) == pytest.approx(curve(1), rel=0.02)
    assert cost.step(9) == pytest.approx(curve(9), rel=0.1)


def test_a_slower_machine_leaves_ratios() -> None:
    cost = StepCost(0.003, 0.0005)
    for _ in range(200):
        cost.observe([(1, 1)], 0.003)
        cost.observe([(1, 5)], 0.004)
    for _ in range(100):
        cost.observe([(1, 1)], 0.006)
    assert cost.step(1) == pytest.approx(0.006, rel=0.02)
    assert cost.step(5) / cost.step(1) == pytest.approx(4 / 3, rel=0.25)


def test_what_was_never_measured_is_hoped_for() -> None:
    """A jump between one and two tokens says nothing of many more of them."""
    cost = StepCost(0.003, 0.001)
    for _ in range(20):
        cost.observe([(1, 1)], 0.003)
        cost.observe([(1, 2)], 0.006)
        cost.observe([(1, 4)], 0.0061)
    assert cost.step(16) == pytest.approx(0.0061 + 12 * 0.00005, rel=0.05)


def test_one_pause_counts_for_twice_a_step_at_most() -> None:
    cost = StepCost(0.003, 0.001)
    for _ in range(50):
        cost.observe([(1, 1)], 0.003)
    cost.observe([(1, 1)], 10.0)
    assert cost.step(1) < 0.004


def test_proposing_is_learned() -> None:
    """Eight drafts of one sequence, then for each of four: a tenth of a step over them."""
    cost = StepCost(0.003, 0.001, 1.0)
    for _ in range(50):
        cost.observe_drafts(16, 16, 16 * 0.1 * cost.step(1))
        cost.observe_drafts(16, 64, 16 * 0.1 * cost.step(4))
    assert cost.draft_part == pytest.approx(0.1, rel=0.01)
    assert cost.draft(4) == pytest.approx(0.1 * cost.step(4))
    assert cost.draft(0.5) == pytest.approx(0.05 * cost.step(1))
