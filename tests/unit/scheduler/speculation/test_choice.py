"""The choice is the best one there is, by trying all."""

from __future__ import annotations

import itertools
import random

import pytest

from services.scheduler.speculation.choice import LEAST_PACE, Group, choose, forecast
from services.scheduler.speculation.cost import StepCost


def group(kind: int, size: int, chance: float, proposes: float = 1.0, most: int = 6) -> Group:
    proposed = [proposes] * most
    return Group(kind, size, proposed, [proposes * chance ** (position + 1) for position in range(most)])


@pytest.mark.parametrize("seed", range(20))
def test_it_is_as_good_as_the_best_of_all(seed: int) -> None:
    draw = random.Random(seed)
    cost = StepCost(0.003, draw.choice([0.0001, 0.0005, 0.001]), draw.choice([0.0, 0.1]))
    groups = [group(kind, draw.randint(1, 4), draw.random(), draw.choice([0.2, 1.0])) for kind in range(3)]
    rows = sum(one.size for one in groups) + draw.randint(0, 3)
    chosen = choose(groups, rows, cost, 6)

    def pace(limits: tuple[int, ...]) -> float:
        """Of the slowest sequence, as a part of what it is without drafts."""
        gains = [1 + sum(one.accepted[:limit]) for one, limit in zip(groups, limits, strict=True)]
        slowest = 1 if rows > sum(one.size for one in groups) else min(gains)
        return slowest * cost.step(rows) / forecast(groups, limits, rows, cost).seconds

    fair = [limits for limits in itertools.product(range(7), repeat=3) if pace(limits) >= LEAST_PACE]
    best = max(forecast(groups, limits, rows, cost).rate for limits in fair)
    assert chosen.rate == pytest.approx(forecast(groups, chosen.limits, rows, cost).rate)
    assert pace(chosen.limits) >= LEAST_PACE
    assert chosen.rate >= 0.97 * best


def test_room_and_the_executor_s_own_limit_are_kept() -> None:
    cost = StepCost(1.0, 0.0)
    assert choose([group(0, 4, 0.9)], 4, cost, 3).limits == (3,)
    assert choose([group(0, 4, 0.9)], 4, cost, 6, room=9).limits == (2,)
    assert choose([group(0, 4, 0.9)], 4, cost, 0).limits == (0,)
    assert choose([], 4, cost) == ((), 4.0)


def test_closed_form() -> None:
    """Tokens per second of one sequence: (1 - a^(k+1)) / (1 - a) for k drafts, over 1 + k c (Leviathan et al. 2023)."""
    cost, chance = StepCost(1.0, 0.0, 0.1), 0.8
    rates = [(1 - chance ** (k + 1)) / (1 - chance) / (1 + 0.1 * k) for k in range(7)]
    for k, expected in enumerate(rates):
        assert forecast([group(0, 1, chance)], [k], 1, cost).rate == pytest.approx(expected)
    assert choose([group(0, 1, chance)], 1, cost, 6).rate == pytest.approx(max(rates))
