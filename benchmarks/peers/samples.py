"""What is measured, in which order, and how contestants are compared. Pure functions.

Machines drift by tens of percent within minutes. So each run of a peer stands between two runs of Quire and is compared
with their mean, and a result is the median of such ratios.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean

OURS = "quire"
BOUND = "engine bound"


@dataclass(frozen=True, slots=True)
class Measured:
    """What one run of a contestant found: figures by name, and facts about it (version, format, instruction set)."""

    figures: dict[str, float]
    facts: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sample:
    """One run of one contestant."""

    suite: str
    contestant: str
    round: int
    seconds: float  # of the whole run, loading included
    figures: dict[str, float]


@dataclass(slots=True)
class Record:
    """All that was measured, in order, and what is known of each contestant."""

    samples: list[Sample] = field(default_factory=list)
    facts: dict[str, dict[str, str]] = field(default_factory=dict)


def bracketed(peers: Sequence[str], round_number: int) -> Iterator[str]:
    """The order of a round: Quire, a peer, Quire, a peer, ... Quire. Each round begins with another peer."""
    yield OURS
    for at in range(len(peers)):
        yield peers[(at + round_number) % len(peers)]
        yield OURS


def ratios(samples: Sequence[Sample], figure: str, peer: str) -> dict[int, float]:
    """Quire's figure over the peer's, by round. Samples are in the order in which they were measured."""
    found = {}
    for before, run, after in zip(samples, samples[1:], samples[2:], strict=False):
        around = (before, after)
        if run.contestant != peer or not run.figures.get(figure):
            continue
        if all(own.contestant == OURS and own.round == run.round and figure in own.figures for own in around):
            found[run.round] = fmean(own.figures[figure] for own in around) / run.figures[figure]
    return found


def hardest(
    samples: Sequence[Sample], figure: str, peers: Iterable[str], choose: Callable[[Iterable[float]], float]
) -> list[float]:
    """Per round, the ratio to the best of the peers: `choose` is min where more is better, max where less is.

    Only rounds in which all of these peers were measured count.
    """
    found = [ratios(samples, figure, peer) for peer in peers]
    rounds = set.intersection(*map(set, found)) if found else set()
    return [choose(by_round[number] for by_round in found) for number in sorted(rounds)]
