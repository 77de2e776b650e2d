"""Seeds, one after the other or in several processes: what came of each, and the last events of one that failed."""

from __future__ import annotations

import logging
import traceback
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context

from quire.simulation.faults.scenario import draw
from quire.simulation.faults.world import World

TAIL_EVENTS = 60
SEEDS_AT_A_TIME = 16


@dataclass(frozen=True, slots=True)
class Result:
    """What one seed led to."""

    seed: int
    outcomes: Counter[str] = field(default_factory=Counter)  # requests by how they ended
    failure: str = ""  # what must hold and does not; empty where all does
    tail: tuple[str, ...] = ()  # the last events before it


def play(seed: int) -> Result:
    """Plays a seed; where it fails once more, to say what happened before: it fails in the same way."""
    try:
        return Result(seed, Counter(World(draw(seed)).play().values()))
    except Exception as error:
        return Result(seed, failure=_describe(error), tail=replay(seed))


def replay(seed: int) -> tuple[str, ...]:
    """The last events of a seed, up to its failure or its end."""
    tail: deque[str] = deque(maxlen=TAIL_EVENTS)
    world = World(draw(seed), lambda seconds, what: tail.append(f"{seconds:9.4f} {what}"))
    try:
        world.play()
    except Exception as error:
        tail.append(f"{world.timeline.now:9.4f} {_describe(error)}")
    return tuple(tail)


def play_all(first: int, count: int, processes: int) -> Iterator[Result]:
    """The results of seeds [first, first + count), in order."""
    seeds = range(first, first + count)
    if processes == 1:
        before = logging.root.manager.disable
        _be_quiet()
        try:
            yield from map(play, seeds)
        finally:
            logging.disable(before)
        return
    with ProcessPoolExecutor(processes, get_context("spawn"), _be_quiet) as pool:
        yield from pool.map(play, seeds, chunksize=SEEDS_AT_A_TIME)


def _be_quiet() -> None:
    """What the cores log of faults is expected here."""
    logging.disable(logging.CRITICAL)


def _describe(error: Exception) -> str:
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({where.filename.rpartition('/')[2]}, line {where.lineno})"
