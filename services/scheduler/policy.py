"""What an operator may choose: the order in which sequences are admitted, and when an executor takes any."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from services.scheduler.queue import ArrivalQueue, FairQueue, WaitingQueue

if TYPE_CHECKING:
    from services.scheduler.state import Executor


class PolicyName(enum.StrEnum):
    """Policies by the names that settings know."""

    FAIR = "fair"  # deadlines, priorities with ageing, fairness between tenants
    FCFS = "fcfs"  # first come, first served
    STATIC = "static"  # the same in batches: the next one begins when the last has ended


class Infeasible(enum.StrEnum):
    """What becomes of a request whose first token cannot come before its deadline."""

    LAST = "last"  # it waits behind all others
    REFUSE = "refuse"  # it is refused as soon as it arrives


class Policy(Protocol):
    """Chosen once, at the start."""

    @property
    def name(self) -> PolicyName: ...

    def queue(self) -> WaitingQueue:
        """An empty queue, for a new model."""
        ...

    @property
    def overtakes(self) -> bool:
        """Whether urgent work gets the places of less urgent work that runs."""
        ...

    @property
    def gathers(self) -> bool:
        """Whether newcomers are placed long before their prompts are computed."""
        ...

    def admits(self, executor: Executor) -> bool:
        """Whether an executor that has room takes newcomers now."""
        ...


@dataclass(frozen=True, slots=True)
class Fair:
    """The fair order; whoever is next enters as soon as there is room."""

    ageing_seconds: float = 10.0

    @property
    def name(self) -> PolicyName:
        return PolicyName.FAIR

    @property
    def overtakes(self) -> bool:
        return True

    @property
    def gathers(self) -> bool:
        return False

    def queue(self) -> WaitingQueue:
        return FairQueue(self.ageing_seconds)

    def admits(self, executor: Executor) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class FirstCome:
    """By arrival alone, as soon as there is room. To compare with."""

    @property
    def name(self) -> PolicyName:
        return PolicyName.FCFS

    @property
    def overtakes(self) -> bool:
        return False

    @property
    def gathers(self) -> bool:
        return False

    def queue(self) -> WaitingQueue:
        return ArrivalQueue()

    def admits(self, executor: Executor) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class StaticBatches:
    """By arrival alone, and only into an executor that has nothing left to do. To compare with."""

    @property
    def name(self) -> PolicyName:
        return PolicyName.STATIC

    @property
    def overtakes(self) -> bool:
        return False

    @property
    def gathers(self) -> bool:
        return True

    def queue(self) -> WaitingQueue:
        return ArrivalQueue()

    def admits(self, executor: Executor) -> bool:
        return not executor.running


def make_policy(name: PolicyName, ageing_seconds: float) -> Policy:
    """The policy of that name. `ageing_seconds` is the fair one's."""
    policies: dict[PolicyName, Policy] = {
        PolicyName.FAIR: Fair(ageing_seconds),
        PolicyName.FCFS: FirstCome(),
        PolicyName.STATIC: StaticBatches(),
    }
    return policies[name]
