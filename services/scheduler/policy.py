"""What an operator may choose: the order in which sequences are admitted, and when an executor takes any."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from services.scheduler.queue import ArrivalQueue, FairQueue, WaitingQueue

if TYPE_CHECKING:
    from services.scheduler.state import Executor


PolicyName = Literal["fair", "fcfs", "static"]
"""Deadlines, priorities with ageing and fairness between tenants; first come, first served; the same in batches, of
which the next one begins when the last has ended."""
Infeasible = Literal["last", "refuse"]
"""What becomes of a request whose first token cannot come before its deadline: it waits behind all others, or it is
refused as soon as it arrives."""


@dataclass(frozen=True, slots=True)
class Policy:
    """Chosen once, at the start."""

    name: PolicyName
    queue: Callable[[], WaitingQueue]  # an empty one, for a new model
    overtakes: bool = False  # whether urgent work gets the places of less urgent work that runs
    keeps_places: bool = False  # whether the last ones are for tenants that hold less than their share
    gathers: bool = False  # whether newcomers are placed long before their prompts are computed, all at once

    def admits(self, executor: Executor) -> bool:
        """Whether an executor that has room takes newcomers now."""
        return not (self.gathers and executor.running)


def fair(ageing_seconds: float = 10.0) -> Policy:
    """Whoever is next in the fair order enters as soon as there is room."""
    return Policy("fair", lambda: FairQueue(ageing_seconds), overtakes=True, keeps_places=True)


def first_come() -> Policy:
    """By arrival alone, as soon as there is room. To compare with."""
    return Policy("fcfs", ArrivalQueue)


def static_batches() -> Policy:
    """By arrival alone, and only into an executor that has nothing left to do. To compare with."""
    return Policy("static", ArrivalQueue, gathers=True)


def make_policy(name: PolicyName, ageing_seconds: float) -> Policy:
    """The policy of that name. `ageing_seconds` is the fair one's."""
    match name:
        case "fair":
            return fair(ageing_seconds)
        case "fcfs":
            return first_come()
        case "static":
            return static_batches()
