"""Why sequences run, why they wait, and why they were passed over: in words for people."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from services.scheduler.sequence import Sequence
    from services.scheduler.state import Executor, Model, State

KEPT = 32
"""Decisions of one kind that are remembered."""


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


@dataclass(frozen=True, slots=True)
class Decision:
    """Any other decision about a request, or about one of its sequences."""

    at: float  # seconds
    what: str  # in a word
    request_id: str
    choice: int
    tenant: str
    model: str  # as asked for
    why: str


class Decisions:
    """The latest of each kind: refusals by the thousand push out no preemption."""

    def __init__(self) -> None:
        self._latest: dict[str, deque[Decision]] = defaultdict(lambda: deque(maxlen=KEPT))

    def add(self, decision: Decision) -> None:
        self._latest[decision.what].append(decision)

    def note(self, now: float, what: str, sequence: Sequence, why: str) -> None:
        """Adds one about a sequence. `now` in seconds."""
        request = sequence.request
        self.add(Decision(now, what, request.request_id, sequence.choice, request.tenant, request.model, why))

    def latest(self) -> list[Decision]:
        """Newest first."""
        found = [decision for decisions in self._latest.values() for decision in decisions]
        return sorted(found, key=lambda decision: -decision.at)


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
