"""What the benchmark of speculation counts: tokens while all places are taken, and ratios with their uncertainty."""

from __future__ import annotations

import math

import pytest

from benchmarks.speculation import Arm, Heard, Interval, falls_short, rate


def heard(started: float, *arrivals: float) -> Heard:
    return Heard([7] * len(arrivals), [(at, 1) for at in arrivals], started)


def test_only_the_time_in_which_all_places_are_taken_counts() -> None:
    """Two places: the third request follows the first, and when the second ends nothing follows."""
    answers = [heard(0.0, 1.0, 2.0), heard(0.0, 1.5, 3.5), heard(2.0, 2.5, 3.0, 9.0)]
    assert rate(answers, 2) == pytest.approx(4 / (3.5 - 1.5))


def test_intervals_are_those_of_ratios() -> None:
    found = Interval.of([0.9, 1.0, 1.0 / 0.9])
    assert found.mean == pytest.approx(1.0)
    assert found.low == pytest.approx(1 / found.high)
    assert found.high == pytest.approx(math.exp(4.30 * -math.log(0.9) / math.sqrt(3)))
    assert Interval.of([1.2]).low == 0.0


def test_it_says_which_bars_are_missed() -> None:
    arms = {"off": Arm([100.0, 100.0]), "auto": Arm([97.0, 97.0]), "4": Arm([101.0, 101.0])}
    assert falls_short("mixed", 8, arms) == [
        "mixed at 8: auto is 0.970 of off, not 0.98",
        "mixed at 8: auto is 0.960 of 4, not 0.97",
    ]
    assert falls_short("random", 1, arms)[0].startswith("random at 1")
    assert not falls_short("mixed", 8, arms | {"auto": Arm([100.0, 100.0])})
