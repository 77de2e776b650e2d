"""One turn: what is due by now, who must yield, what executors compute next, which blocks are needed."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.v1 import executor_pb2, kvmanager_pb2
from services.scheduler.alarms import ring
from services.scheduler.batcher import plan
from services.scheduler.beams import make_way
from services.scheduler.drain import drain
from services.scheduler.overtake import overtake
from services.scheduler.preempt import preempt
from services.scheduler.reserve import reserve
from services.scheduler.room import step_budget
from services.scheduler.slowness import compare
from services.scheduler.state import Executor, State


@dataclass(slots=True)
class Outgoing:
    """What a turn decided to send."""

    plans: list[tuple[Executor, executor_pb2.StepPlan]] = field(default_factory=list)
    reservations: list[kvmanager_pb2.ReserveRequest] = field(default_factory=list)


def turn(state: State, now: float) -> Outgoing:
    """Runs after every event. Pure but for the state; `now` in seconds of a monotonic clock."""
    ring(state, now)
    overtake(state, now)
    compare(state, now)
    outgoing = Outgoing()
    touched, state.touched = state.touched, {}
    touched.update((executor, None) for executor in state.executors if executor.draining)
    for executor in touched:  # an executor that nothing happened to needs nothing, and costs nothing
        if not executor.serves or executor.stream_failure:
            continue
        if executor.starved:
            preempt(state, executor, now)
        make_way(state, executor, now)
        if executor.draining:
            drain(state, executor, now)
        message = plan(state, executor, step_budget(state, executor), now)
        if message is not None:
            outgoing.plans.append((executor, message))
    outgoing.reservations = reserve(state, now)  # after the plans: they decide which sequences need blocks
    return outgoing
