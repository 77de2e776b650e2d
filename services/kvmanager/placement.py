"""Where a sequence goes: a pure choice among places, with its reasons."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from services.common.topology import LOCAL_DISTANCE

RUNNING_TOKENS = 16
"""A running sequence delays a newcomer about as much as this many prompt tokens: it shares every later step."""
LOAD_SHARE = 16
"""Bringing a block up from a lower tier costs about one part in this many of computing it anew."""


class Outcome(enum.IntEnum):
    """What became of a reservation. Values are those of the wire."""

    GRANTED = 1
    NO_BLOCKS = 2
    NEVER_FITS = 3
    NO_EXECUTOR = 4
    INVALID = 5


class Need(NamedTuple):
    """Blocks of one pool that a sequence would take."""

    new_count: int  # beyond the cached ones
    room: int  # that can be handed out now
    whole_count: int  # cached ones included
    pool_count: int


@dataclass(frozen=True, slots=True)
class Candidate:
    """One place on one allowed executor, with its load as the scheduler states it."""

    executor_id: str
    node: int
    running_count: int
    queued_tokens: int  # prompt tokens waiting there
    prompt_tokens: int
    cached_tokens: int  # there, or being computed by another sequence
    needs: tuple[Need, ...]  # per pool
    distance: int = 0  # from what computes to the blocks: 10 is local, 0 unknown
    loadable_tokens: int = 0  # beyond the cached ones, in lower tiers
    running_beside: float | None = None  # of the running ones, those beside it on average as it runs; None is all
    slowness: float = 1.0  # how many times as long as its peers the executor takes

    @property
    def fits_ever(self) -> bool:
        return all(need.whole_count <= need.pool_count for need in self.needs)

    @property
    def fits_now(self) -> bool:
        return self.fits_ever and all(need.new_count <= need.room for need in self.needs)

    @property
    def cost(self) -> float:
        """Prompt tokens that the executor computes before this sequence's first output, all else converted.

        What the sequence itself reads of KV it reads over the distance: its own work costs in proportion. So do the
        blocks that it will read with every output token, as much as they fill of the executor's time: that of one
        running sequence.
        """
        computed = self.prompt_tokens - self.cached_tokens - self.loadable_tokens
        own = computed + self.loadable_tokens / LOAD_SHARE + RUNNING_TOKENS
        running = self.running_count if self.running_beside is None else self.running_beside
        return (own * remoteness(self.distance) + self.queued_tokens + RUNNING_TOKENS * running) * self.slowness

    @property
    def share_left(self) -> float:
        """Part of the tightest pool that stays available."""
        return min((need.room - need.new_count) / need.pool_count for need in self.needs)


def remoteness(distance: int) -> float:
    """How many times as long reading takes over a distance as at hand."""
    return max(distance, LOCAL_DISTANCE) / LOCAL_DISTANCE


class Decision(NamedTuple):
    """The position of the chosen candidate (-1 for none) and why."""

    outcome: Outcome
    position: int
    reasons: list[str]


def choose(candidates: Sequence[Candidate], left_out: int = 0) -> Decision:
    """The cheapest place that has room now; of equal ones the emptiest, then the first by executor and node.

    `left_out` places are known to be worse than one of the candidates.
    """
    if not candidates:
        return Decision(
            Outcome.NO_EXECUTOR,
            -1,
            ["no allowed executor with that model and epoch is connected and has told what it holds"],
        )
    fitting = [index for index, candidate in enumerate(candidates) if candidate.fits_now]
    if not fitting:
        outcome = Outcome.NO_BLOCKS if any(c.fits_ever for c in candidates) else Outcome.NEVER_FITS
        more = [f"so do {left_out} others"] if left_out else []
        return Decision(outcome, -1, [*(_shortage(candidate) for candidate in candidates), *more])

    def rank(index: int) -> tuple[float, float, str, int]:
        candidate = candidates[index]
        return candidate.cost, -candidate.share_left, candidate.executor_id, candidate.node

    best = min(fitting, key=rank)
    return Decision(Outcome.GRANTED, best, _reasons(candidates[best], len(candidates) + left_out))


def _reasons(chosen: Candidate, count: int) -> list[str]:
    cached = f"{chosen.cached_tokens} of {chosen.prompt_tokens} tokens cached"
    if chosen.loadable_tokens:
        cached += f", {chosen.loadable_tokens} in lower tiers"
    reasons = [
        cached,
        f"{chosen.running_count} running, {chosen.queued_tokens} tokens queued",
        f"cost {chosen.cost:.0f}, the least with room among {count}",
    ]
    if chosen.distance > LOCAL_DISTANCE:
        reasons.append(f"node {chosen.node} at distance {chosen.distance}: nearer ones cost more or have no room")
    return reasons


def _shortage(candidate: Candidate) -> str:
    parts = [
        f"{need.whole_count} KV blocks, has {need.pool_count}"
        if need.whole_count > need.pool_count
        else f"{need.new_count} new blocks, {need.room} available"
        for need in candidate.needs
    ]
    return f"{candidate.executor_id} node {candidate.node}: needs {'; '.join(parts)}"
