"""Ways of batching to compare: the scheduler's own, and what others do, as far as settings can say it."""

from __future__ import annotations

from typing import NamedTuple

from quire.simulation.executor import ModelledExecutor
from services.scheduler.loop import limits
from services.scheduler.settings import SchedulerSettings
from services.scheduler.state import UNLIMITED, Limits

NAMES = ("fair", "no-preemption")


class Policy(NamedTuple):
    """How a scheduler and its executors batch."""

    name: str
    limits: Limits
    executor: type[ModelledExecutor] = ModelledExecutor


def policy(name: str, settings: SchedulerSettings) -> Policy:
    """One of `NAMES`, everything else as the settings say.

    - fair: continuous batching, in the scheduler's order.
    - fcfs: the same, first come first served.
    - no-preemption: blocks for all that a client allows are reserved at once, so that nothing ever has to yield.
    - static: so are they; a batch begins when the last one's longest answer has ended, and all its rows run till then.
    """
    if name == "no-preemption":
        return Policy(name, limits(settings.model_copy(update={"lookahead_tokens": UNLIMITED})))
    if name == "fair":
        return Policy(name, limits(settings))
    raise ValueError(f"{name!r} is not one of {', '.join(NAMES)}")
