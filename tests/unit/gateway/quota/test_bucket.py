"""The bucket against a plain model in exact fractions."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from services.gateway.quota.bucket import TICKS, full, refilled, units, wait_ms

RATES = st.one_of(st.integers(1, 100), st.integers(1, 10**9))


class Plain:
    """A bucket as one would write it down: units, seconds, fractions."""

    def __init__(self, per_minute: int) -> None:
        self.most = Fraction(per_minute)
        self.level = self.most

    def pass_time(self, ms: int) -> None:
        self.level = min(self.most, self.level + self.most * Fraction(ms, 60_000))

    def take(self, amount: int) -> bool:
        if self.level < amount:
            return False
        self.level -= amount
        return True


@given(RATES, st.lists(st.tuples(st.integers(0, 200_000), st.integers(0, 10**9), st.integers(-50, 50))))
def test_it_is_the_plain_bucket(rate: int, steps: list[tuple[int, int, int]]) -> None:
    """Time passes, something is taken where it is there, and something is given back or charged whatever is there."""
    plain, level = Plain(rate), full(rate)
    for ms, amount, more in steps:
        amount %= rate + 1
        plain.pass_time(ms)
        level = refilled(level, rate, ms)
        assert Fraction(level, TICKS) == plain.level
        assert units(level) == max(0, plain.level.__floor__())
        wait = wait_ms(level, rate, amount)
        assert (wait == 0) is plain.take(amount)
        if wait:  # exactly then it is there, and no millisecond before
            assert refilled(level, rate, wait) >= amount * TICKS > refilled(level, rate, wait - 1)
        else:
            level -= amount * TICKS
        plain.level = min(plain.most, plain.level - more)
        level = min(full(rate), level - more * TICKS)


@given(RATES, st.lists(st.integers(0, 5_000), min_size=1, max_size=60))
def test_what_passes_is_bounded_in_every_window(rate: int, pauses: list[int]) -> None:
    level, now, taken = full(rate), 0, []
    for pause in pauses:
        now += pause
        level = refilled(level, rate, pause)
        amount = min(rate, units(level))
        level -= amount * TICKS
        taken.append((now, amount))
    for first in range(len(taken)):
        for last in range(first, len(taken)):
            total = sum(amount for _, amount in taken[first : last + 1])
            assert total * TICKS <= full(rate) + rate * (taken[last][0] - taken[first][0])
