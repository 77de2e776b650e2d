"""Ways of batching to compare: the scheduler's own, and what others do, as far as settings can say it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from quire.simulation.executor import ModelledExecutor, PaddedExecutor
from services.kvmanager.manager import KvManager
from services.scheduler.loop import limits
from services.scheduler.settings import SchedulerSettings
from services.scheduler.state import UNLIMITED, Limits

NAMES = ("fair", "fcfs", "static", "no-preemption")


class Policy(NamedTuple):
    """How a scheduler and its executors batch, and what places sequences."""

    name: str
    limits: Limits
    executor: type[ModelledExecutor] = ModelledExecutor
    kvmanager: Callable[[float], KvManager] = KvManager  # given the seconds of a lease


def policy(name: str, settings: SchedulerSettings) -> Policy:
    """One of `NAMES` (KeyError for another), everything else as the settings say.

    - fair: continuous batching, in the scheduler's order.
    - fcfs: the same, first come first served.
    - no-preemption: blocks for all that a client allows are reserved at once, so that nothing ever has to yield.
    - static: so are they; a batch begins when the last one's longest answer has ended, and all its rows run till then.
    """
    whole = {"lookahead_tokens": UNLIMITED}
    ways: dict[str, tuple[dict[str, Any], type[ModelledExecutor]]] = {
        "fair": ({"policy": "fair"}, ModelledExecutor),
        "fcfs": ({"policy": "fcfs"}, ModelledExecutor),
        "static": ({"policy": "static", **whole}, PaddedExecutor),
        "no-preemption": ({"policy": "fair", **whole}, ModelledExecutor),
    }
    changes, executor = ways[name]
    return Policy(name, limits(settings.model_copy(update=changes)), executor)
