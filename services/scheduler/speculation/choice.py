"""How many drafts each kind of sequence gets, so that the whole batch gains most tokens per second. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from services.common.speculation import LEAST_PACE, MAX_DRAFT_TOKENS
from services.scheduler.speculation.cost import StepCost

NEAR = 8.0
"""So many tokens more tell what one more takes, to compare positions by."""


class Group(NamedTuple):
    """Sequences of one kind in a batch."""

    kind: int
    size: int
    proposed: Sequence[float]  # by position from the first: how likely a draft is proposed there where it is admitted
    accepted: Sequence[float]  # how likely it is accepted


class Choice(NamedTuple):
    """Draft limits by group."""

    limits: tuple[int, ...]
    rate: float  # tokens per second that are expected of the batch


class Forecast(NamedTuple):
    """Of a step, on average."""

    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


def forecast(groups: Sequence[Group], limits: Sequence[int], rows: int, cost: StepCost) -> Forecast:
    """A step of a batch of `rows` sequences, those of the groups included, with these draft limits."""
    tokens, drafts, none = float(rows), 0.0, 1.0
    drafting = [0.0] * max(limits, default=0)  # sequences by position
    for group, limit in zip(groups, limits, strict=True):
        if limit:
            tokens += group.size * sum(group.accepted[:limit])
            drafts += group.size * sum(group.proposed[:limit])
            none *= _silence(group)
            for position in range(limit):
                drafting[position] += group.size * group.proposed[position]
    return Forecast(tokens, _seconds(rows, drafts, none, cost) + sum(map(cost.draft, drafting)))


def is_allowed(
    groups: Sequence[Group], limits: Sequence[int], rows: int, cost: StepCost, room: float = float("inf")
) -> bool:
    """Whether a step has room for the drafts, and nobody becomes slower than LEAST_PACE."""
    drafts = sum(group.size * sum(group.proposed[:limit]) for group, limit in zip(groups, limits, strict=True))
    gains = [1 + sum(group.accepted[:limit]) for group, limit in zip(groups, limits, strict=True)]
    slowest = min(gains) if sum(group.size for group in groups) == rows else 1.0
    return drafts <= room and slowest * cost.step(rows) >= LEAST_PACE * forecast(groups, limits, rows, cost).seconds


def choose(
    groups: Sequence[Group], rows: int, cost: StepCost, most: int = MAX_DRAFT_TOKENS, room: float = float("inf")
) -> Choice:
    """The draft limits, up to `most` and `room` drafts in all, that let the batch gain most.

    Positions are added one by one, each time those that gain most for what they cost; what is best along that way is
    taken, for a step need not become longer by the same for each token, and who gains nothing waits for it.
    """
    limits = [0] * len(groups)
    best = Choice(tuple(limits), forecast(groups, limits, rows, cost).rate)
    tokens, drafts, none = float(rows), 0.0, 1.0
    drafting, proposing = [0.0] * most, 0.0  # sequences by position, and the seconds that takes
    open_groups = set(range(len(groups))) if most > 0 else set()
    slope = (cost.step(rows + NEAR) - cost.step(rows)) / NEAR

    def worth(index: int) -> float:
        """Tokens gained by the next position of a group for the seconds it takes."""
        group, position = groups[index], limits[index]
        proposed = group.size * group.proposed[position]
        seconds = slope * proposed
        if cost.draft_part:
            seconds += cost.draft(drafting[position] + proposed) - cost.draft(drafting[position])
        return group.size * group.accepted[position] / max(seconds, 1e-12)

    while open_groups:
        at = max(open_groups, key=worth)
        group, position = groups[at], limits[at]
        proposed = group.size * group.proposed[position]
        drafts += proposed
        if drafts > room:
            break
        proposing -= cost.draft(drafting[position])
        drafting[position] += proposed
        proposing += cost.draft(drafting[position])
        tokens += group.size * group.accepted[position]
        if position == 0:
            none *= _silence(group)
        limits[at] += 1
        if limits[at] == most:
            open_groups.discard(at)
        gained = tokens / (_seconds(rows, drafts, none, cost) + proposing)
        if gained > best.rate and is_allowed(groups, limits, rows, cost, room):
            best = Choice(tuple(limits), gained)
    return best


def _silence(group: Group) -> float:
    """How likely nothing is proposed for any sequence of a group in a step."""
    return max(0.0, 1.0 - group.proposed[0]) ** group.size


def _seconds(rows: int, drafts: float, none: float, cost: StepCost) -> float:
    """Seconds of a step that verifies so many drafts on average, all of them in those steps that have any."""
    if none >= 1.0:
        return cost.step(rows)
    some = 1.0 - none
    return none * cost.step(rows) + some * cost.step(rows + drafts / some)
