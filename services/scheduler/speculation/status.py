"""Drafts on one executor, for people and for other services."""

from __future__ import annotations

from quire.v1 import scheduler_status_pb2
from services.common.speculation import AUTO, OFF
from services.scheduler.state import Executor, State


def describe_drafts(state: State, executor: Executor) -> scheduler_status_pb2.SpeculationStatus | None:
    """What drafts gave there; None where none are proposed."""
    if executor.description is None or not executor.description.HasField("speculation"):
        return None
    fixed, tally = state.limits.speculation, executor.counters.drafts
    return scheduler_status_pb2.SpeculationStatus(
        mode=AUTO if fixed is None else str(fixed) if fixed else OFF,
        step_count=tally.steps,
        proposed_count=sum(tally.proposed_by_position),
        accepted_count=sum(tally.accepted_by_position),
        proposed_by_position=tally.proposed_by_position,
        accepted_by_position=tally.accepted_by_position,
        steps_by_limit=tally.limits,
        saved_seconds=tally.saved_seconds,
    )
