"""How likely copied drafts are to be accepted, by the length of the match that they continue: learned as it goes.

Pure. What is learned on one sequence serves all of them.
"""

from __future__ import annotations

from bisect import bisect_right

from services.common.speculation import MAX_DRAFT_TOKENS

_MATCHES = (1, 2, 3, 4, 5, 6, 8, 12, 16, 32)
"""The least match of each class."""
_AT_FIRST = (0.2, 0.45, 0.55, 0.65, 0.7, 0.75, 0.8, 0.82, 0.9, 0.95)
"""Of the first draft, before anything was seen: what English chats and code had on average."""
_WEIGHT = 20.0
"""Drafts seen that count as much as what was assumed."""
_MEMORY = 2000.0
"""Drafts seen at one place that count: older ones fade."""


class Confidence:
    """Mutable."""

    def __init__(self) -> None:
        self._tried = [[_WEIGHT] * MAX_DRAFT_TOKENS for _ in _MATCHES]
        # A draft behind accepted ones is likelier than the first.
        self._accepted = [
            [_WEIGHT * min(first + 0.02 * place, 0.95) for place in range(MAX_DRAFT_TOKENS)] for first in _AT_FIRST
        ]

    def chances(self, match: int, count: int) -> list[float]:
        """For each of `count` drafts behind a match of so many tokens: how likely it and all before it are accepted."""
        at = _class(match)
        found, chance = [], 1.0
        for tried, accepted in zip(self._tried[at][:count], self._accepted[at], strict=False):
            chance *= accepted / tried
            found.append(chance)
        return found

    def saw(self, match: int, compared: int, accepted: int) -> None:
        """Of `compared` drafts behind a match, the first `accepted` were what came, and the next, if any, was not."""
        at = _class(match)
        tried, right = self._tried[at], self._accepted[at]
        for place in range(min(accepted + 1, compared)):
            if tried[place] >= _MEMORY:
                tried[place] *= 0.5
                right[place] *= 0.5
            tried[place] += 1.0
            right[place] += place < accepted


def _class(match: int) -> int:
    return bisect_right(_MATCHES, match) - 1
