"""Which drafts pay: against trying every choice."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels._native import StepCosts, best_draft_lengths
from services.common.speculation import LEAST_PACE
from services.executor.speculation.ngram import MARGIN


def test_costs_lie_on_lines_between_what_was_measured_and_beyond() -> None:
    costs = StepCosts([(1, 1.0), (3, 2.5), (5, 2.2), (9, 4.0)])
    found = [costs.ratio(1, tokens) for tokens in (1, 2, 3, 5, 9, 13)]
    assert found == pytest.approx([1.0, 1.6, 2.2, 2.3875, 4.0, 5.6125])  # no segment is flat
    assert costs.ratio(3, 9) == pytest.approx(costs.ratio(1, 9) / costs.ratio(1, 3))


def test_a_disturbed_figure_hides_no_cost() -> None:
    """Eight tokens were measured while the machine did something else, and seem to take as long as twelve."""
    costs = StepCosts([(1, 1.0), (8, 3.0), (12, 3.0), (17, 4.0)])
    assert costs.ratio(8, 12) > 1.03


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.lists(st.floats(0, 1), max_size=3), min_size=1, max_size=3),
    st.integers(3, 5),
    st.lists(st.floats(0.1, 5), min_size=3, max_size=3),
)
def test_finds_the_best_rate(falling: list[list[float]], tokens: int, rises: list[float]) -> None:
    chances = [list(itertools.accumulate(some, lambda a, b: a * b)) for some in falling]
    seconds = list(itertools.accumulate(rises))
    costs = StepCosts(list(zip((1, 6, 12), seconds, strict=True)))

    def rate(lengths: tuple[int, ...]) -> float:
        expected = tokens + sum(sum(some[:length]) for some, length in zip(chances, lengths, strict=True))
        return expected / costs.ratio(tokens, tokens + sum(lengths))

    best = max(map(rate, itertools.product(*(range(len(some) + 1) for some in chances))))
    plain = rate((0,) * len(chances))
    lengths = best_draft_lengths(chances, tokens, costs, margin=MARGIN, least_pace=LEAST_PACE)
    chosen = rate(tuple(lengths))
    if costs.ratio(tokens, tokens + sum(map(len, chances))) < 2:  # nobody can become too slow
        assert chosen == pytest.approx(best if best > plain * (1 + MARGIN) else plain)
    else:
        assert plain <= chosen <= best * (1 + 1e-9)
        assert pace(chances, lengths, tokens, costs) >= LEAST_PACE


def pace(chances: list[list[float]], lengths: list[int], tokens: int, costs: StepCosts) -> float:
    """Of the slowest sequence, as a part of its speed without drafts."""
    gains = [1 + sum(some[:length]) for some, length in zip(chances, lengths, strict=True)]
    slowest = min(gains) if len(gains) == tokens else 1.0
    return slowest / costs.ratio(tokens, tokens + sum(lengths))


def test_neighbours_keep_half_of_their_speed() -> None:
    """However much one of them gains by its drafts; where all gain, a step may take longer."""
    costs = StepCosts([(1, 1.0), (2, 1.1), (34, 9.1)])
    sure, none = [0.999**place for place in range(1, 17)], [0.0] * 16
    (alone,) = best_draft_lengths([sure], 1, costs, margin=MARGIN, least_pace=LEAST_PACE)
    beside, _ = best_draft_lengths([sure, none], 2, costs, margin=MARGIN, least_pace=LEAST_PACE)
    both = best_draft_lengths([sure, sure], 2, costs, margin=MARGIN, least_pace=LEAST_PACE)
    assert (alone, both) == (16, [16, 16])
    assert 0 < beside < 8
    assert pace([sure, none], [beside, 0], 2, costs) >= LEAST_PACE > pace([sure, none], [beside + 1, 0], 2, costs)


def steps(true: Callable[[int], float], counts: Sequence[int], rounds: int) -> Iterator[tuple[int, float]]:
    """Tokens and seconds of steps on a machine whose speed wanders, and on which every sixth step is disturbed."""
    draw = random.Random(1)
    speed = 1.0
    for _ in range(rounds):
        for tokens in (counts[0], draw.choice(counts[1:])):
            speed *= math.exp(draw.gauss(0, 0.02))
            disturbed = draw.uniform(1, 8) if draw.random() < 1 / 6 else 1.0
            yield tokens, speed * true(tokens) * disturbed * math.exp(draw.gauss(0, 0.05))


@pytest.mark.parametrize(
    "believed", [[1.0] * 8, [1.0, 1.3, 1.6, 1.9, 2.5, 5, 6, 7], [1.0, 1.1, 1.7, 1.7, 1.8, 2.7, 3, 4]]
)
def test_what_was_measured_wrongly_is_corrected(believed: list[float]) -> None:
    """Whatever loading the machine did while the model was loaded, and however busy it is now."""
    costs = StepCosts(list(zip((1, 2, 3, 4, 6, 8, 12, 17), believed, strict=True)))

    def true(tokens: int) -> float:
        return 1.0 if tokens == 1 else 1.1 + 0.25 * (tokens - 2)

    for plain, counts in ((1, (1, 2, 3, 4, 6, 8, 10, 12, 17)), (8, (8, 9, 10, 12, 16))):
        for tokens, seconds in steps(true, counts, 200):
            costs.observe(plain, tokens, seconds)
        for tokens in counts:
            assert costs.ratio(plain, tokens) == pytest.approx(true(tokens) / true(plain), rel=0.4)


def test_steps_never_computed_follow_what_others_took() -> None:
    costs = StepCosts([(1, 1.0), (2, 1.1), (8, 1.7)])
    for _ in range(20):
        costs.observe(1, 1, 1.0)
        costs.observe(1, 2, 1.8)
    for tokens in (2, 4, 8, 40):
        assert costs.ratio(1, tokens) == pytest.approx(1 + 0.8 * (tokens - 1), rel=0.05)
    assert costs.ratio(8, 40) == pytest.approx(1 + 3.2 / 1.7)  # other batches are another matter


def test_steps_of_other_batches_are_not_compared() -> None:
    costs = StepCosts([(1, 1.0), (4, 2.0)])
    for _ in range(20):
        costs.observe(2, 2, 1.0)
        costs.observe(3, 3, 9.0)
    assert costs.ratio(3, 4) == pytest.approx(2.0 / (5 / 3))


def test_no_figure_leads_to_steps_that_take_nothing() -> None:
    """Longer steps seem to be shorter again and again."""
    costs = StepCosts([(1, 1.0), (128, 2.0), (256, 4.0)])
    for _ in range(50):
        costs.observe(1, 1, 1.0)
        costs.observe(1, 256, 0.5)
    assert 1 < costs.ratio(1, 128) < costs.ratio(1, 256) < costs.ratio(1, 4096)


def test_one_disturbed_step_changes_nothing() -> None:
    costs = StepCosts([(1, 1.0), (2, 1.5), (4, 2.0)])
    for factor in (1.0, 3.0):
        for tokens in (1, 4, 1, 2, 1, 4):
            costs.observe(1, tokens, factor * {1: 1.0, 2: 1.5, 4: 2.0}[tokens])
        costs.observe(1, 1, factor)
    costs.observe(1, 2, 90.0)
    assert [costs.ratio(1, tokens) for tokens in (1, 2, 4)] == pytest.approx([1.0, 1.5, 2.0])


@pytest.mark.parametrize("wrong", [math.inf, -math.inf, math.nan, 0.0, -1.0])
def test_what_is_no_time_says_nothing(wrong: float) -> None:
    for measured in ([(1, wrong), (2, 1.0)], [(1, 1.0), (2, wrong)]):
        with pytest.raises(ValueError, match="positive seconds"):
            StepCosts(measured)
    costs = StepCosts([(1, 1.0), (2, 1.5), (4, 2.0)])
    for _ in range(50):
        costs.observe(1, 1, 1.0)
        costs.observe(1, 4, wrong)
    assert [costs.ratio(1, tokens) for tokens in (1, 2, 4)] == pytest.approx([1.0, 1.5, 2.0])


def test_a_step_without_tokens_is_none() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        StepCosts([(0, 1.0), (1, 1.0)])


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from((-(2**31), -1, 0, 1, 2, 3, 33, 2**31 - 1)),
            st.sampled_from((-(2**31), -1, 0, 1, 2, 3, 17, 64, 2**31 - 1)),
            st.sampled_from((math.inf, -math.inf, math.nan, 0.0, -1.0, 1e-320, 1e-300, 1e-6, 1.0, 1e300)),
        ),
        max_size=40,
    )
)
def test_whatever_is_heard_drafts_cost_something(heard: list[tuple[int, int, float]]) -> None:
    costs = StepCosts([(1, 1.0), (2, 1.2), (17, 3.0)])
    for plain, tokens, seconds in heard:
        costs.observe(plain, tokens, seconds)
    for plain in (1, 2, 8, 33):
        found = [costs.ratio(plain, tokens) for tokens in (plain, plain + 1, plain + 16, plain + 4096)]
        assert found[0] == 1.0
        assert all(low < high < math.inf for low, high in itertools.pairwise(found))
