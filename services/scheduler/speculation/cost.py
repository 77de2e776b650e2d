"""What a step takes by the number of its tokens, and what proposing drafts takes: fitted to what is measured. Pure."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Sequence

from quire.v1 import types_pb2
from services.scheduler.pace import UNKNOWN_STEP_SECONDS, UNKNOWN_TOKEN_SECONDS

KNOTS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Tokens of a step. Between two of them its time is a straight line, and so it is beyond the last."""
LEVEL_GAIN, CURVE_GAIN, DRAFT_GAIN, FIRST_GAIN = 0.2, 0.05, 0.2, 0.7
"""Part of an error that the figures take over at once: more of it where a knot was hardly measured."""


class StepCost:
    """Seconds of a step as a level times a curve over its tokens.

    What makes all steps longer (contexts that grow, neighbours on the machine) moves the level, and so also what is
    known of steps that are not computed now: what is decided rests on ratios, which stay. The curve leads through what
    was measured. Beyond, it rises as stated or as before, by whichever is less: what is hoped of steps of more tokens
    is soon measured, what is feared of them would never be.
    """

    def __init__(self, step_seconds: float, token_seconds: float, draft_part: float = 0.0) -> None:
        """As stated before anything is measured: of a step of one token, of each further one.

        `draft_part`: what proposing one draft for each of some sequences takes, as a part of a step over them. Drafts
        are proposed one position after the other, by something that computes much as the model does.
        """
        self._level = 1.0
        self._curve = [step_seconds + token_seconds * (knot - 1) for knot in KNOTS]
        self._measured = [0.0] * len(KNOTS)  # how often
        self._known = [0]  # knots that count; the first one was stated
        self._slope = token_seconds
        self.draft_part = draft_part

    @classmethod
    def stated(cls, description: types_pb2.ExecutorDescription) -> StepCost:
        """What an executor says of itself."""
        rate = description.prefill_tokens_per_second
        step = description.decode_step_seconds or UNKNOWN_STEP_SECONDS
        token = min(1.0 / rate if rate > 0 else UNKNOWN_TOKEN_SECONDS, step)
        return cls(step, token, description.speculation.draft_token_seconds / step)

    def step(self, tokens: float) -> float:
        """Seconds of a step of so many tokens, at least 1, drafts that it verifies included."""
        return self._level * self._at(tokens)

    def observe(self, parts: Sequence[tuple[int, float]], seconds: float) -> None:
        """Takes in what so many steps of so many tokens took together, for each part of them.

        Normalized least mean squares, each figure in units of itself: what had most part in the time moves most. No
        report counts for more than twice or less than half of what was expected.
        """
        times = [steps * self.step(tokens) for steps, tokens in parts]
        expected = sum(times)
        error = min(max(seconds / expected, 0.5), 2.0) - 1.0
        scale = error * expected / sum(time * time for time in times)
        for (_, tokens), time in zip(parts, times, strict=True):
            knot, part = _place(tokens)
            weight = time / expected
            if part < 1.0:
                self._correct(knot, scale * time * (1.0 - part), weight * (1.0 - part))
            if part > 0.0:
                self._correct(knot + 1, scale * time * min(part, 1.0), weight * min(part, 1.0))
        self._level *= 1.0 + LEVEL_GAIN * error

    def draft(self, sequences: float) -> float:
        """Seconds of proposing one draft for each of so many sequences, on average: at times for fewer than one."""
        if sequences >= 1.0:
            return self.draft_part * self.step(sequences)
        return self.draft_part * self.step(1.0) * sequences

    def observe_drafts(self, rounds: int, drafts: int, seconds: float) -> None:
        """Takes in what proposing took: in so many rounds, each one draft for some sequences, so many in all."""
        whole = rounds * self.step(drafts / rounds)
        self.draft_part += DRAFT_GAIN * (seconds / whole - self.draft_part)

    def _at(self, tokens: float) -> float:
        known, curve = self._known, self._curve
        after = bisect_right(known, tokens, key=KNOTS.__getitem__)
        if after == 0:
            return curve[known[0]]  # fewer tokens than ever were computed
        before = known[after - 1]
        if after < len(known):
            above = known[after]
            slope = (curve[above] - curve[before]) / (KNOTS[above] - KNOTS[before])
        else:
            slope = self._slope
            if after > 1:
                below = known[after - 2]
                slope = min(slope, max(0.0, (curve[before] - curve[below]) / (KNOTS[before] - KNOTS[below])))
        return curve[before] + slope * (tokens - KNOTS[before])

    def _correct(self, knot: int, error: float, weight: float) -> None:
        """Moves one figure by an error; `weight` is its part in what was measured."""
        value = self._at(KNOTS[knot])
        measured = self._measured[knot]
        if not measured and knot not in self._known:
            insort(self._known, knot)
        gain = max(CURVE_GAIN, min(FIRST_GAIN, 1.0 / (1.0 + measured)))
        self._measured[knot] = measured + weight
        self._curve[knot] = value * (1.0 + min(max(gain * error, -0.5), 1.0))


def _place(tokens: float) -> tuple[int, float]:
    """The knot at or before, and the part of the way to the next one; more than 1 beyond the last."""
    at = min(max(bisect_right(KNOTS, tokens) - 1, 0), len(KNOTS) - 2)
    return at, (tokens - KNOTS[at]) / (KNOTS[at + 1] - KNOTS[at])
