"""Credit of one sequence: steps granted by its scheduler, used in the order sent."""

from __future__ import annotations

from collections import deque


class Credit:
    """A FIFO of (token limit, steps)."""

    __slots__ = ("_grants", "steps")

    def __init__(self) -> None:
        self._grants: deque[list[int]] = deque()
        self.steps = 0  # in all grants

    def add(self, token_limit: int, steps: int) -> None:
        self.steps += steps
        if self._grants and self._grants[-1][0] == token_limit:
            self._grants[-1][1] += steps
        else:
            self._grants.append([token_limit, steps])

    @property
    def token_limit(self) -> int:
        """The most tokens of the next step; 0 without credit."""
        return self._grants[0][0] if self._grants else 0

    def use(self) -> None:
        """Takes one step off the head."""
        head = self._grants[0]
        head[1] -= 1
        self.steps -= 1
        if head[1] == 0:
            self._grants.popleft()
