"""Credit of one sequence: steps granted by its scheduler, used in the order sent."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

UNBOUNDED = 1 << 40
"""Drafts that a plan says no bound of."""


@dataclass(slots=True)
class _Grant:
    token_limit: int
    draft_limit: int
    steps: int


class Credit:
    """A FIFO of (token limit, draft limit, steps)."""

    __slots__ = ("_grants", "drafts", "steps")

    def __init__(self) -> None:
        self._grants: deque[_Grant] = deque()
        self.steps = 0  # in all grants
        self.drafts = 0  # that may still be accepted in all

    def add(self, token_limit: int, steps: int, draft_limit: int = 0, drafts: int = UNBOUNDED) -> None:
        self.steps += steps
        self.drafts += drafts
        last = self._grants[-1] if self._grants else None
        if last is not None and (last.token_limit, last.draft_limit) == (token_limit, draft_limit):
            last.steps += steps
        else:
            self._grants.append(_Grant(token_limit, draft_limit, steps))

    @property
    def token_limit(self) -> int:
        """The most known tokens of the next step; 0 without credit."""
        return self._grants[0].token_limit if self._grants else 0

    @property
    def draft_limit(self) -> int:
        """The most drafts of the next step, beside its known tokens."""
        return self._grants[0].draft_limit if self._grants else 0

    def use(self) -> None:
        """Takes one step off the head."""
        head = self._grants[0]
        head.steps -= 1
        self.steps -= 1
        if head.steps == 0:
            self._grants.popleft()
