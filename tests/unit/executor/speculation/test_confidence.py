"""What copied drafts are worth, by the match behind them."""

from __future__ import annotations

import itertools

import pytest

from services.executor.speculation.confidence import Confidence


def test_chances_fall_with_each_draft_and_rise_with_the_match() -> None:
    found = [Confidence().chances(match, 16) for match in (1, 2, 4, 7, 10, 20, 500)]
    for some in found:
        assert len(some) == 16
        assert all(0 < later <= earlier < 1 for earlier, later in itertools.pairwise(some))
    for shorter, longer in itertools.pairwise(found):
        assert all(a <= b for a, b in zip(shorter, longer, strict=True))


def test_learns_each_place_from_what_reached_it() -> None:
    confidence = Confidence()
    for _ in range(3000):  # two are right, the third is not; of later ones nothing is seen
        confidence.saw(3, 5, 2)
    before, chances = Confidence().chances(3, 5), confidence.chances(3, 5)
    assert chances[:2] == pytest.approx([1.0, 1.0], abs=0.05)
    assert chances[2] < 0.03
    assert chances[3] / chances[2] == pytest.approx(before[3] / before[2])
    assert confidence.chances(2, 5) == Confidence().chances(2, 5)


def test_text_that_ends_early_says_nothing_of_later_places() -> None:
    confidence = Confidence()
    for _ in range(100):
        confidence.saw(3, 1, 1)
    first, second = confidence.chances(3, 2)
    before = Confidence().chances(3, 2)
    assert first > before[0]
    assert second / first == pytest.approx(before[1] / before[0])


def test_what_was_long_ago_fades() -> None:
    confidence = Confidence()
    for _ in range(20_000):
        confidence.saw(5, 1, 1)
    for _ in range(4000):
        confidence.saw(5, 1, 0)
    assert confidence.chances(5, 1)[0] < 0.25
