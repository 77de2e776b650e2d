"""Why sequences run and why they wait, in words for people."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from services.scheduler.state import Executor, Model, State


@dataclass(frozen=True, slots=True)
class Admission:
    """A sequence that got its place."""

    at: float  # seconds
    request_id: str
    choice: int
    tenant: str
    waited_seconds: float
    target: str  # the executor
    why: str  # it was next
    placement: tuple[str, ...]  # the kvmanager's reasons


def obstacle(state: State, name: str, model: Model) -> str:
    """What keeps the next sequence of a model's queue from being placed now; empty where nothing does."""
    serving = [executor for executor in state.serving(name) if executor.takes]
    if not serving:
        return "no executor takes sequences of this model"
    if not state.kv_connected:
        return "the kvmanager is gone"
    if model.window <= model.asked_count:
        return model.refusal
    busy = [_busy(state, executor) for executor in serving]
    return "; ".join(dict.fromkeys(busy)) if all(busy) else ""


def _busy(state: State, executor: Executor) -> str:
    """Why an executor takes none; empty where it does."""
    if executor.starved:
        return f"sequences that run on {executor.target} wait for KV blocks"
    if not state.limits.policy.admits(executor):
        return f"the batch on {executor.target} has not ended"
    if executor.free_sequences <= 0:
        held = len(executor.running) + executor.asked_count
        return f"{executor.target} has no room: {held} of {held + executor.free_sequences} sequences"
    return ""
