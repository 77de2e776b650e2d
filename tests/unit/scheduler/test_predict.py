"""What is expected of an answer's length, from answers that ended and from answers that were cut."""

from __future__ import annotations

import random

import pytest

from services.scheduler.predict import GROWTH, MOST_KINDS, Kind, QuantilePredictor

CHAT = Kind("a", "m", 100)


def teach(predictor: QuantilePredictor, kind: Kind, *lengths: int) -> None:
    for length in lengths:
        predictor.ended(kind, length)


def test_nothing_known_leaves_the_budget() -> None:
    predictor = QuantilePredictor()
    assert predictor.expect(CHAT, 0, 300) == 300
    teach(predictor, CHAT, 10, 10, 10)  # too few to say anything
    assert predictor.expect(CHAT, 0, 300) == 300


@pytest.mark.parametrize("median", [1, 7, 40, 333, 5000])
def test_the_median_is_found_within_the_width_of_a_bucket(median: int) -> None:
    predictor = QuantilePredictor()
    rng = random.Random(median)
    for _ in range(400):
        predictor.ended(CHAT, max(1, round(median * 4 ** rng.uniform(-1, 1))))
    assert median / GROWTH**1.5 <= predictor.expect(CHAT, 0, 1 << 20) <= max(median * GROWTH**1.5, 2)


def test_the_budget_bounds_what_is_expected() -> None:
    predictor = QuantilePredictor()
    teach(predictor, CHAT, *[100] * 20)
    assert predictor.expect(CHAT, 0, 30) == 30


def test_an_answer_that_outlived_most_is_expected_to_be_one_of_the_long_ones() -> None:
    predictor = QuantilePredictor()
    teach(predictor, CHAT, *[10] * 90, *[1000] * 30)
    assert predictor.expect(CHAT, 0, 5000) < 15
    assert 1000 <= predictor.expect(CHAT, 50, 5000) < 1000 * GROWTH
    assert predictor.expect(CHAT, 2000, 5000) == 5000  # none was that long


def test_cut_answers_do_not_make_others_look_short() -> None:
    """Half of all are cut at 10 tokens, and those that were not are 100 long: so would the cut ones have been."""
    predictor = QuantilePredictor()
    for _ in range(50):
        predictor.cut(CHAT, 10)
        predictor.ended(CHAT, 100)
    assert 100 <= predictor.expect(CHAT, 0, 5000) < 100 * GROWTH


def test_where_nearly_all_are_cut_the_budget_is_expected() -> None:
    predictor = QuantilePredictor()
    for _ in range(50):
        predictor.cut(CHAT, 64)
    teach(predictor, CHAT, *[5] * 10)
    assert predictor.expect(CHAT, 0, 900) == 900


def test_a_cut_before_the_first_token_says_nothing() -> None:
    predictor = QuantilePredictor()
    predictor.cut(CHAT, 0)
    assert len(predictor) == 0


def test_finer_kinds_win_and_coarser_ones_stand_in() -> None:
    predictor = QuantilePredictor()
    teach(predictor, Kind("a", "m", 100), *[10] * 20)
    teach(predictor, Kind("a", "m", 4000), *[600] * 60)
    assert predictor.expect(Kind("a", "m", 127), 0, 999) < 15  # the same length of prompt
    assert predictor.expect(Kind("a", "m", 9), 0, 999) >= 600  # of this tenant: most were long
    assert predictor.expect(Kind("b", "m", 100), 0, 999) >= 600  # of this model
    assert predictor.expect(Kind("a", "other", 100), 0, 999) == 999


def test_it_follows_a_change() -> None:
    predictor = QuantilePredictor()
    teach(predictor, CHAT, *[10] * 5000)
    teach(predictor, CHAT, *[500] * 600)
    assert predictor.expect(CHAT, 0, 5000) >= 500


def test_memory_is_bounded_however_many_tenants_there_are() -> None:
    predictor = QuantilePredictor()
    for number in range(MOST_KINDS):
        predictor.ended(Kind(f"tenant {number}", "m", 5), 8)
        predictor.ended(CHAT, 30)
    assert len(predictor) == MOST_KINDS
    assert 30 <= predictor.expect(CHAT, 0, 999) < 30 * GROWTH  # what is in use stays


def test_a_quantile_other_than_the_median() -> None:
    predictor = QuantilePredictor(0.9)
    teach(predictor, CHAT, *[10] * 80, *[400] * 20)
    assert predictor.expect(CHAT, 0, 999) >= 400
