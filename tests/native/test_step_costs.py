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
    costs = StepCosts([(1, 1.0), (3, 2.5), (5, 2.0), (9, 4.0)])
    assert [costs.seconds(tokens) for tokens in (1, 2, 3, 4, 5, 7, 9, 13)] == pytest.approx(
        [1.0, 1.5, 2.0, 2.0, 2.0, 3.0, 4.0, 6.0]
    )


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
        return expected / costs.seconds(tokens + sum(lengths))

    best = max(map(rate, itertools.product(*(range(len(some) + 1) for some in chances))))
    plain = rate((0,) * len(chances))
    lengths = best_draft_lengths(chances, tokens, costs, margin=MARGIN, least_pace=LEAST_PACE)
    chosen = rate(tuple(lengths))
    if 2 * costs.seconds(tokens) > costs.seconds(tokens + sum(map(len, chances))):  # nobody can become too slow
        assert chosen == pytest.approx(best if best > plain * (1 + MARGIN) else plain)
    else:
        assert plain <= chosen <= best * (1 + 1e-9)
        assert pace(chances, lengths, tokens, costs) >= LEAST_PACE


def pace(chances: list[list[float]], lengths: list[int], tokens: int, costs: StepCosts) -> float:
    """Of the slowest sequence, as a part of its speed without drafts."""
    gains = [1 + sum(some[:length]) for some, length in zip(chances, lengths, strict=True)]
    slowest = min(gains) if len(gains) == tokens else 1.0
    return slowest * costs.seconds(tokens) / costs.seconds(tokens + sum(lengths))


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


@pytest.mark.parametrize("believed", [[1.0] * 8, [1.0, 3, 4, 5, 6, 7, 8, 9], [1.0, 1.1, 4, 4, 4, 4.1, 4.2, 9]])
def test_what_was_measured_wrongly_is_corrected(believed: list[float]) -> None:
    """Whatever loading the machine did while the model was loaded, and however busy it is now."""
    costs = StepCosts(list(zip((1, 2, 3, 4, 6, 8, 12, 17), believed, strict=True)))

    def true(tokens: int) -> float:
        return 1.0 if tokens == 1 else 1.1 + 0.25 * (tokens - 2)

    for tokens, seconds in steps(true, (1, 2, 3, 4, 6, 8, 10, 12, 17), 600):
        costs.observe(tokens, seconds)
    for tokens in (2, 3, 4, 6, 8, 12, 17):
        assert costs.seconds(tokens) / costs.seconds(1) == pytest.approx(true(tokens), rel=0.2)


def test_steps_never_computed_follow_what_shorter_ones_took() -> None:
    costs = StepCosts([(1, 1.0), (2, 1.0), (4, 1.0), (8, 1.0)])
    for _ in range(20):
        costs.observe(1, 1.0)
        costs.observe(2, 1.8)
    assert costs.seconds(1) == pytest.approx(1.0)
    for tokens in (2, 4, 8, 40):
        assert costs.seconds(tokens) == pytest.approx(1.8, rel=0.1)


def test_figures_that_fall_are_not_led_on_to_nothing() -> None:
    """The last figure is corrected below the one before it; a step of many more tokens takes no less."""
    costs = StepCosts([(1, 1.0), (128, 2.0), (256, 4.0)])
    for _ in range(50):
        costs.observe(1, 1.0)
        costs.observe(256, 1.0)
    assert costs.seconds(256) < costs.seconds(128)
    assert costs.seconds(4096) == pytest.approx(costs.seconds(256))
    costs.observe(1, 1.0)
    costs.observe(4096, 3.0)
    assert costs.seconds(4096) > costs.seconds(1)


def test_a_slower_machine_changes_nothing() -> None:
    costs = StepCosts([(1, 1.0), (2, 1.5), (4, 2.0)])
    for factor in (1.0, 3.0):
        for tokens in (1, 4, 1, 2, 1, 4):
            costs.observe(tokens, factor * {1: 1.0, 2: 1.5, 4: 2.0}[tokens])
        costs.observe(1, factor)
    assert [costs.seconds(tokens) for tokens in (1, 2, 4)] == pytest.approx([1.0, 1.5, 2.0])
