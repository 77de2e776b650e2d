"""When a scheduler is left alone, and when it is asked again."""

from __future__ import annotations

import random

import pytest

from services.gateway.placing.breaker import Breaker, Outcome, Phase, Rules

GOOD, SLOW, FAILED, UNKNOWN = Outcome.GOOD, Outcome.SLOW, Outcome.FAILED, Outcome.UNKNOWN
RULES = Rules(window=10.0, least=10, first_pause=2.0, longest_pause=8.0, probes=2)


def after(outcomes: list[Outcome], seconds: float = 0.1) -> Breaker:
    breaker = Breaker(RULES)
    for index, outcome in enumerate(outcomes):
        breaker.begin(index * seconds)
        breaker.end(outcome, index * seconds)
    return breaker


@pytest.mark.parametrize(
    ("outcomes", "phase"),
    [
        ([FAILED] * 9, Phase.CLOSED),  # too few to tell
        ([FAILED] * 10, Phase.OPEN),
        ([GOOD] * 6 + [FAILED] * 5, Phase.CLOSED),
        ([GOOD] * 5 + [FAILED] * 5, Phase.OPEN),
        ([SLOW] * 7 + [GOOD] * 3, Phase.CLOSED),
        ([GOOD] * 2 + [SLOW] * 8, Phase.OPEN),
        ([GOOD] * 2 + [SLOW] * 5 + [FAILED] * 3, Phase.OPEN),  # slow or failed are eight of ten
        ([UNKNOWN] * 50, Phase.CLOSED),
    ],
)
def test_what_opens_it(outcomes: list[Outcome], phase: Phase) -> None:
    assert after(outcomes).phase(2.0) is phase


def test_what_is_old_does_not_count() -> None:
    assert after([FAILED] * 30, seconds=1.5).phase(45.0) is Phase.CLOSED  # never ten within ten seconds


def test_probes_close_it() -> None:
    breaker = after([FAILED] * 10)
    assert not breaker.admits(1.0)
    assert breaker.retry_after(1.0) == pytest.approx(1.9)
    assert breaker.phase(2.9) is Phase.HALF_OPEN
    for _ in range(2):
        assert breaker.admits(2.9)
        breaker.begin(2.9)
    assert not breaker.admits(2.9), "two at a time are enough to see"
    assert breaker.retry_after(2.9) == 1.0
    breaker.end(GOOD, 3.0)
    assert breaker.phase(3.0) is Phase.HALF_OPEN
    assert not breaker.admits(3.0)
    breaker.end(GOOD, 3.1)
    assert breaker.phase(3.1) is Phase.CLOSED
    breaker.end(FAILED, 3.2)
    assert breaker.admits(3.2), "what was before is forgotten"


@pytest.mark.parametrize("outcome", [FAILED, SLOW])
def test_a_probe_that_fails_doubles_the_pause(outcome: Outcome) -> None:
    breaker, now, pauses = after([FAILED] * 10), 0.9, []
    for _ in range(4):
        opened = now
        while not breaker.admits(now):
            now += 0.1
        pauses.append(round(now - opened))
        breaker.begin(now)
        breaker.end(outcome, now)
    assert pauses == [2, 4, 8, 8]


def test_a_probe_whose_client_goes_gives_its_place_back() -> None:
    breaker = after([FAILED] * 10)
    for _ in range(20):
        assert breaker.admits(3.0)
        breaker.begin(3.0)
        breaker.end(UNKNOWN, 3.0)
    assert breaker.phase(3.0) is Phase.HALF_OPEN


def test_what_went_through_before_it_opened_says_nothing_new() -> None:
    breaker = Breaker(RULES)
    for _ in range(20):
        breaker.begin(0.0)
    for _ in range(20):
        breaker.end(FAILED, 1.0)
    assert breaker.phase(2.5) is Phase.OPEN
    breaker.end(FAILED, 3.5)
    assert breaker.phase(3.5) is Phase.HALF_OPEN


def test_it_never_stays_shut() -> None:
    """Whatever happens, a scheduler that works again is asked again within the longest pause and its probes' time."""
    rng = random.Random(5)
    for _ in range(200):
        breaker, now, open_count = Breaker(RULES), 0.0, 0
        for _ in range(300):
            now += rng.random()
            if rng.random() < 0.6 and breaker.admits(now):
                breaker.begin(now)
                open_count += 1
            elif open_count:
                open_count -= 1
                breaker.end(rng.choice([GOOD, SLOW, FAILED, UNKNOWN]), now)
        while open_count:
            open_count -= 1
            breaker.end(UNKNOWN, now)
        now += RULES.longest_pause + 0.001
        for _ in range(RULES.probes):
            assert breaker.admits(now)
            breaker.begin(now)
            breaker.end(GOOD, now)
        assert breaker.phase(now) is Phase.CLOSED
