"""Which drafts pay: against trying every choice."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.executor.speculation.costs import StepCosts, best_lengths


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
    assert rate(tuple(best_lengths(chances, tokens, costs))) == pytest.approx(best)
