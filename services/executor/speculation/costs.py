"""What drafts must give to pay for themselves: a step with more tokens takes longer. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate


class StepCosts:
    """Seconds of a step by its tokens, from some that were measured: straight lines between these, and beyond them."""

    def __init__(self, measured: Sequence[tuple[int, float]]) -> None:
        """Pairs of tokens and seconds, ascending by tokens; at least two.

        Other work on the machine only adds to them: no step takes longer than one with more tokens.
        """
        self._tokens = [tokens for tokens, _ in measured]
        self._seconds = list(accumulate((seconds for _, seconds in reversed(measured)), min))[::-1]

    def seconds(self, tokens: int) -> float:
        at = min(max(bisect_left(self._tokens, tokens), 1), len(self._tokens) - 1)
        first, second = self._tokens[at - 1], self._tokens[at]
        slope = (self._seconds[at] - self._seconds[at - 1]) / (second - first)
        return self._seconds[at - 1] + slope * (tokens - first)


def best_lengths(chances: Sequence[Sequence[float]], tokens: int, costs: StepCosts) -> list[int]:
    """How many drafts of each sequence to verify, so that the step gives the most tokens a second.

    `chances[i][j]` is the probability that the first j + 1 drafts of sequence i are accepted; `tokens` the step has
    without drafts.
    """
    # Chances of a sequence fall with every draft, so the likeliest of all never skip one.
    offers = sorted(((chance, i) for i, some in enumerate(chances) for chance in some), key=lambda offer: -offer[0])
    expected, count = float(tokens), 0
    best_rate, best_count = expected / costs.seconds(tokens), 0
    for chance, _ in offers:
        expected, count = expected + chance, count + 1
        rate = expected / costs.seconds(tokens + count)
        if rate > best_rate:
            best_rate, best_count = rate, count
    lengths = [0] * len(chances)
    for _, i in offers[:best_count]:
        lengths[i] += 1
    return lengths
