"""What copied drafts are worth, by the match behind them."""

from __future__ import annotations

import itertools

import pytest

from kernels._native import DraftConfidence

LEAST_CHANCE = 0.02
VERDICTS = UNTRIED, WRONG, RIGHT = range(3)


def test_chances_fall_with_each_draft_and_rise_with_the_match_and_with_what_became_of_it() -> None:
    for verdict in VERDICTS:
        found = [DraftConfidence(16).chances(match, verdict) for match in (1, 2, 4, 7, 10, 20, 500)]
        assert all(
            LEAST_CHANCE <= later <= earlier < 1 for some in found for earlier, later in itertools.pairwise(some)
        )
        for shorter, longer in itertools.pairwise(found):
            assert len(shorter) <= len(longer) <= 16
            assert all(a <= b for a, b in zip(shorter, longer, strict=False))
    for match in (1, 3, 40):
        wrong, untried, right = (DraftConfidence(16).chances(match, verdict)[0] for verdict in (WRONG, UNTRIED, RIGHT))
        assert wrong < untried < right


def test_learns_each_place_from_what_reached_it() -> None:
    confidence = DraftConfidence(16)
    for _ in range(3000):  # two are right, the third is mostly not; of later ones little is seen
        confidence.saw(3, UNTRIED, 5, 2)
    for _ in range(80):
        confidence.saw(3, UNTRIED, 3, 3)
    before, chances = DraftConfidence(16).chances(3, UNTRIED), confidence.chances(3, UNTRIED)
    assert chances[:2] == pytest.approx([1.0, 1.0], abs=0.05)
    assert chances[2] < 0.12
    assert chances[3] / chances[2] == pytest.approx(before[3] / before[2])
    for match, verdict in ((2, UNTRIED), (3, WRONG), (3, RIGHT)):
        assert confidence.chances(match, verdict) == DraftConfidence(16).chances(match, verdict)


def test_text_that_ends_early_says_nothing_of_later_places() -> None:
    confidence = DraftConfidence(16)
    for _ in range(100):
        confidence.saw(3, UNTRIED, 1, 1)
    first, second = confidence.chances(3, UNTRIED)[:2]
    before = DraftConfidence(16).chances(3, UNTRIED)
    assert first > before[0]
    assert second / first == pytest.approx(before[1] / before[0])


def test_what_was_long_ago_fades() -> None:
    confidence = DraftConfidence(16)
    for _ in range(20_000):
        confidence.saw(5, UNTRIED, 1, 1)
    for _ in range(4000):
        confidence.saw(5, UNTRIED, 1, 0)
    assert confidence.chances(5, UNTRIED)[0] < 0.25
