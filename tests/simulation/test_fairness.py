"""Jain's index over windows in which tenants wait."""

from __future__ import annotations

import pytest

from quire.simulation.fairness import Fairness, jain


def test_the_index() -> None:
    assert jain([5, 5]) == pytest.approx(1.0)
    assert jain([7, 0]) == pytest.approx(0.5)
    assert jain([0, 0]) == 1.0


def _served(fairness: Fairness, tokens: tuple[float, float]) -> None:
    for tenth in range(35):
        for tenant, count in enumerate(tokens):
            fairness.served(tenant, count, (tenth + 0.5) / 10)


def test_windows_in_which_both_wait_count() -> None:
    fairness = Fairness([1.0, 1.0], window_seconds=1.0)
    for tenant in (0, 1):
        fairness.arrived(tenant, 0.0)
    _served(fairness, (3.0, 1.0))
    # Of 34 tenths of a second the first began before they came; a window is ten of them.
    assert fairness.window_count == 34 - 1 - 10 + 1
    assert fairness.worst == pytest.approx(16 / 20)
    assert fairness.mean == pytest.approx(16 / 20)


def test_weights_divide_what_was_served() -> None:
    fairness = Fairness([3.0, 1.0], window_seconds=1.0)
    for tenant in (0, 1):
        fairness.arrived(tenant, 0.0)
    _served(fairness, (3.0, 1.0))
    assert fairness.worst == pytest.approx(1.0)


def test_who_waits_for_nothing_does_not_count() -> None:
    fairness = Fairness([1.0, 1.0], window_seconds=1.0)
    for tenant in (0, 1):
        fairness.arrived(tenant, 0.0)
    fairness.left(1, 0.05)
    _served(fairness, (3.0, 0.0))
    assert fairness.window_count == 0
    assert fairness.worst is None
