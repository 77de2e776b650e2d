"""What became of drafts on one executor, for metrics and people."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate

from services.common.speculation import MAX_DRAFT_TOKENS


def _zeros() -> list[int]:
    return [0] * (MAX_DRAFT_TOKENS + 1)


@dataclass(slots=True)
class Tally:
    """Sums since a model was first seen on an executor. Lists are by number, from 0."""

    limits: list[int] = field(default_factory=_zeros)  # steps that admitted so many drafts, at least one
    proposed: list[int] = field(default_factory=_zeros)  # of those, steps in which so many were proposed
    accepted: list[int] = field(default_factory=_zeros)  # and so many accepted
    saved_seconds: float = 0.0  # that plain steps would have taken more

    def add(self, limit: int, proposed: int, accepted: int) -> None:
        self.limits[limit] += 1
        self.proposed[proposed] += 1
        self.accepted[accepted] += 1

    @property
    def steps(self) -> int:
        """Steps that admitted drafts."""
        return sum(self.limits)

    @property
    def drafts(self) -> int:
        """Steps in which any were proposed."""
        return sum(self.proposed[1:])

    @property
    def proposed_by_position(self) -> list[int]:
        """Drafts proposed at each position from the first."""
        return _at_least(self.proposed)

    @property
    def accepted_by_position(self) -> list[int]:
        """Of those, accepted."""
        return _at_least(self.accepted)


def _at_least(counts: list[int]) -> list[int]:
    return list(accumulate(reversed(counts[1:])))[::-1]
