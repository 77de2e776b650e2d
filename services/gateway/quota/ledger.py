"""Where requests are counted: one interface, kept in this process or in Redis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from services.gateway.quota.limits import Subject

LEASE_MS = 30_000
"""How long a place is held for a request of which nothing is heard: its gateway may be gone."""

PLACE_WAIT_MS = 1000
"""When to ask again where all places are taken: nobody knows when one ends."""

LIMITS = ("requests_per_minute", "tokens_per_minute", "concurrent_requests")


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request has to wait."""

    subject: Subject
    limit: str  # of LIMITS
    wait_ms: int


class Levels(NamedTuple):
    """What a subject has left, in ticks; 0 where it has no such limit."""

    requests: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a request was let in, and what is left of each subject's rates."""

    refusal: Refusal | None
    levels: tuple[Levels, ...]


class Ledger(Protocol):
    """Counts for one or several gateways. A grant is a request's id, drawn at random. All methods but `take` may be
    repeated: they state totals."""

    async def take(self, grant: str, subjects: Sequence[Subject], tokens: int) -> Verdict:
        """Takes a request, that many tokens and a place of every subject, or nothing at all.

        Raises StoreLost.
        """

    async def renew(self, grant: str, subjects: Sequence[Subject], used: int) -> None:
        """Keeps the places, and charges what was used beyond what is held. Raises StoreLost."""

    async def settle(self, grant: str, subjects: Sequence[Subject], used: int) -> None:
        """Gives the places back, and what was held and not used; charges what was used beyond. Raises StoreLost."""
