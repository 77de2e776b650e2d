"""How likely copied drafts are to be accepted: learned as it goes, by the length of the match that they continue and by
what became of that match before.

Pure. What is learned on one sequence serves all of them.
"""

from __future__ import annotations

from bisect import bisect_right
from enum import IntEnum

from services.common.speculation import MAX_DRAFT_TOKENS

_MATCHES = (1, 2, 3, 4, 5, 6, 8, 12, 16, 32)
"""The least match of each class."""
_AT_FIRST = (0.2, 0.45, 0.55, 0.65, 0.7, 0.75, 0.8, 0.82, 0.9, 0.95)
"""Of the first draft, before anything was seen: what English chats and code had on average."""
_WEIGHT = 20.0
"""Drafts seen that count as much as what was assumed."""
_MEMORY = 2000.0
"""Drafts seen at one place that count: older ones fade."""
LEAST_CHANCE = 0.02
"""Drafts that are less likely pay on no machine."""


class Verdict(IntEnum):
    """What became of a match when the text last came to it."""

    UNTRIED = 0
    WRONG = 1  # what followed was not what had followed before
    RIGHT = 2


_VERDICTS = len(Verdict)
_EXPONENTS = {Verdict.UNTRIED: 1.0, Verdict.WRONG: 2.0, Verdict.RIGHT: 0.6}
"""Of the chance assumed at first."""


class Confidence:
    """Mutable."""

    def __init__(self) -> None:
        firsts = [first ** _EXPONENTS[verdict] for first in _AT_FIRST for verdict in Verdict]
        self._tried = [[_WEIGHT] * MAX_DRAFT_TOKENS for _ in firsts]
        # A draft behind accepted ones is likelier than the first.
        self._accepted = [
            [_WEIGHT * max(first, min(first + 0.02 * place, 0.95)) for place in range(MAX_DRAFT_TOKENS)]
            for first in firsts
        ]
        self._chances: list[list[float] | None] = [None] * len(firsts)  # where they must be computed anew

    def chances(self, match: int, verdict: int) -> list[float]:
        """For each draft behind a match of so many tokens: how likely it and all before it are accepted.

        Falls, and ends before LEAST_CHANCE.
        """
        at = _class(match, verdict)
        found = self._chances[at]
        if found is None:
            found = self._chances[at] = []
            chance = 1.0
            for tried, accepted in zip(self._tried[at], self._accepted[at], strict=True):
                chance *= accepted / tried
                if chance < LEAST_CHANCE:
                    break
                found.append(chance)
        return found

    def saw(self, match: int, verdict: int, compared: int, accepted: int) -> None:
        """Of `compared` drafts behind a match, the first `accepted` were what came, and the next, if any, was not."""
        at = _class(match, verdict)
        tried, right = self._tried[at], self._accepted[at]
        for place in range(accepted + 1 if accepted < compared else compared):
            if tried[place] >= _MEMORY:
                tried[place] *= 0.5
                right[place] *= 0.5
            tried[place] += 1.0
            right[place] += place < accepted
        self._chances[at] = None


def _class(match: int, verdict: int) -> int:
    return (bisect_right(_MATCHES, match) - 1) * _VERDICTS + verdict
