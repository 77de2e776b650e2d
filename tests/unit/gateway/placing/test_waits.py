"""What a new request would wait."""

from __future__ import annotations

import pytest

from services.gateway.placing.waits import Waits


def test_nobody_waits() -> None:
    waits = Waits()
    assert waits.expected(0, 5.0) == 0.0
    waits.enter(1, 0, 5.0)
    waits.begin(1, 6.0)
    assert waits.expected(0, 7.0) == 0.0


def test_a_burst_is_no_queue() -> None:
    waits = Waits()
    for handle in range(1000):
        waits.enter(handle, 0, 0.0)
    waits.begin(0, 0.1)
    assert waits.expected(0, 5.0) == 5.0


def test_a_queue_moves_at_the_pace_of_the_last_seconds() -> None:
    waits, now = Waits(), 0.0
    for handle in range(200):
        waits.enter(handle, 0, 0.0)
    for handle in range(40):  # two a second
        now = handle / 2
        waits.begin(handle, now)
    assert waits.expected(0, now) == pytest.approx(160 / 2, rel=0.1)
    assert waits.expected(0, now + 60) == now + 60  # none began lately: as long as the oldest, at least


def test_only_what_is_as_urgent_is_ahead() -> None:
    waits = Waits()
    waits.enter(1, 0, 0.0)
    waits.enter(2, 5, 7.0)
    assert [waits.expected(priority, 9.0) for priority in (0, 5, 6)] == [9.0, 2.0, 0.0]
    assert waits.leave(1)
    assert not waits.leave(1)
    assert waits.expected(0, 9.0) == 2.0
    waits.enter(2, 5, 9.0)  # it waits already
    assert waits.expected(0, 9.0) == 2.0
    assert len(waits) == 1
