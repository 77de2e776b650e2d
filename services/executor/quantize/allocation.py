"""Which of its options each part of a model gets, so that all together fit into a number of bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from services.executor.quantize.grid import Grid


@dataclass(frozen=True, slots=True)
class Option:
    """One way to store some matrices."""

    grid: Grid
    bytes: int
    loss: float  # that it is expected to add


def allocate(options: Mapping[str, Sequence[Option]], budget: int) -> dict[str, Option]:
    """The option of each part. Raises ValueError where even the smallest ones take more bytes than `budget`.

    Every part begins with its smallest option; the step that saves most loss a byte is taken next, until none fits.
    Steps along the convex hull of bytes and losses give the least loss for the bytes that are spent (Shoham & Gersho
    1988, "Efficient bit allocation for an arbitrary set of quantizers"); what the last steps leave goes to smaller
    ones.
    """
    hulls = {name: lower_hull(own) for name, own in options.items()}
    chosen = {name: hull[0] for name, hull in hulls.items()}
    left = budget - sum(option.bytes for option in chosen.values())
    if left < 0:
        raise ValueError(f"the smallest take {budget - left} bytes")
    steps = [(_slope(here, there), name, here, there) for name, hull in hulls.items() for here, there in pairwise(hull)]
    for _, name, here, there in sorted(steps, key=lambda step: -step[0]):  # within a part, slopes only fall
        if chosen[name] is here and there.bytes - here.bytes <= left:
            left -= there.bytes - here.bytes
            chosen[name] = there
    return chosen


def lower_hull(options: Sequence[Option]) -> list[Option]:
    """Those that some price of a byte makes the best, smallest first: each saves less loss a byte than the last."""
    hull: list[Option] = []
    for option in sorted(options, key=lambda option: (option.bytes, option.loss)):
        if hull and option.loss >= hull[-1].loss:
            continue
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) <= _slope(hull[-1], option):
            hull.pop()
        hull.append(option)
    return hull


def _slope(here: Option, there: Option) -> float:
    """Loss that a byte more saves."""
    return (here.loss - there.loss) / (there.bytes - here.bytes)
