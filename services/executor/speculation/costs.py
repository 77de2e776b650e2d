"""What drafts must give to pay for themselves: a step with more tokens takes longer. Pure."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from services.common.speculation import LEAST_PACE

MARGIN = 0.02
"""Drafts must promise so much more than none: chances and costs are estimates, and the best of many is flattered."""
_FURTHER = (32, 64, 128, 256)
"""Tokens of larger batches, whose steps are known only once they were computed."""
_LEAST_GAIN, _MOST_ERROR = 0.05, 0.5
"""Part of an error that is taken over where a figure was corrected often, and the most that one error counts (a
logarithm): other work on the machine makes single steps much longer."""


class StepCosts:
    """Seconds of a step by its tokens: straight lines between figures, and beyond them.

    Only their ratios matter, and these stay where everything becomes slower, so a step is compared with the step just
    before it: what the machine did besides was the same for both.
    """

    def __init__(self, measured: Sequence[tuple[int, float]]) -> None:
        """Pairs of tokens and seconds, ascending by tokens; at least two.

        Other work on the machine only adds to them: no step takes longer than one with more tokens.
        """
        self._tokens = [tokens for tokens, _ in measured]
        self._seconds = list(accumulate((seconds for _, seconds in reversed(measured)), min))[::-1]
        for tokens in _FURTHER:
            if tokens > self._tokens[-1]:
                self._seconds.append(self._line(tokens))
                self._tokens.append(tokens)
        self._corrected = [0.0] * len(self._tokens)  # how often each was
        self._found: dict[int, float] = {}  # what was asked for since the last correction
        self._before: tuple[int, float] | None = None

    def seconds(self, tokens: int) -> float:
        found = self._found.get(tokens)
        if found is None:
            found = self._found[tokens] = self._line(tokens)
        return found

    def _line(self, tokens: int) -> float:
        at = self._above(tokens)
        first, second = self._tokens[at - 1], self._tokens[at]
        slope = (self._seconds[at] - self._seconds[at - 1]) / (second - first)
        if tokens > second:
            # Corrected figures may fall; going on like that would come to nothing.
            return self._seconds[at] + max(slope, 0.0) * (tokens - second)
        return self._seconds[at - 1] + slope * (tokens - first)

    def observe(self, tokens: int, seconds: float) -> None:
        """Takes in what the next step of decodes took."""
        before, self._before = self._before, (tokens, seconds)
        if before is None or before[0] == tokens or not (seconds > 0 and before[1] > 0):
            return
        (fewer, short), (more, long) = sorted((before, self._before))
        error = math.log(long / short) - math.log(self.seconds(more) / self.seconds(fewer))
        self._correct(fewer, more, min(max(error, -_MOST_ERROR), _MOST_ERROR))

    def _correct(self, fewer: int, more: int, error: float) -> None:
        """Moves the figures beside `more`, as far as they are not those of `fewer`; unseen ones above move along."""
        self._found.clear()
        at = self._above(more)
        part = min(max((more - self._tokens[at - 1]) / (self._tokens[at] - self._tokens[at - 1]), 0.0), 1.0)
        factor = 1.0
        for knot, weight in ((at - 1, 1.0 - part), (at, part)):
            if weight > 0 and self._tokens[knot] > fewer:
                gain = max(_LEAST_GAIN, 1.0 / (2.0 + self._corrected[knot]))
                factor = math.exp(gain * weight * error)
                self._seconds[knot] *= factor
                self._corrected[knot] += weight
        for knot in range(at + 1, len(self._tokens)):
            if not self._corrected[knot]:
                self._seconds[knot] *= factor

    def _above(self, tokens: int) -> int:
        """The figure at or above so many tokens that has one below it."""
        return min(max(bisect_left(self._tokens, tokens), 1), len(self._tokens) - 1)


def best_lengths(chances: Sequence[Sequence[float]], tokens: int, costs: StepCosts) -> list[int]:
    """How many drafts of each sequence to verify, so that the step gives the most tokens a second: none where that is
    not clearly more than without, and never so many that a sequence falls below LEAST_PACE.

    `chances[i][j]` is the probability that the first j + 1 drafts of sequence i are accepted; `tokens` the step has
    without drafts.
    """
    # Chances of a sequence fall with every draft, so the likeliest of all never skip one.
    offers = [(chance, i) for i, some in enumerate(chances) for chance in some]
    if len(chances) > 1:
        offers.sort(key=lambda offer: -offer[0])
    plain = costs.seconds(tokens)
    expected, count, gains = float(tokens), 0, [1.0] * len(chances)
    best_rate, best_count = expected / plain * (1.0 + MARGIN), 0
    for chance, i in offers:
        expected, count = expected + chance, count + 1
        gains[i] += chance
        seconds = costs.seconds(tokens + count)
        if expected > best_rate * seconds and _is_fair(gains, tokens, plain, seconds):
            best_rate, best_count = expected / seconds, count
    lengths = [0] * len(chances)
    for _, i in offers[:best_count]:
        lengths[i] += 1
    return lengths


def _is_fair(gains: Sequence[float], tokens: int, plain: float, seconds: float) -> bool:
    """Whether each sequence keeps LEAST_PACE. `gains`: tokens that are expected of those that may have drafts."""
    if seconds * LEAST_PACE <= plain:
        return True
    slowest = min(gains) if len(gains) == tokens else 1.0
    return slowest * plain >= LEAST_PACE * seconds
