"""Urgent work overtakes: who has to start by now and finds all places taken gets that of one of lower priority.

Only where the client stated when the first token is due, and it can still come by its deadline. The place is one that
`preempt` would have taken first, of the lowest priority there. A sequence yields so once, and its next place comes
before those of all that never ran; so nobody is passed over for ever, and nothing goes to and fro.
"""

from __future__ import annotations

from services.scheduler.intake import prompt_speeds
from services.scheduler.preempt import choose_victim, yield_place
from services.scheduler.queue import is_feasible
from services.scheduler.sequence import Request, Sequence
from services.scheduler.state import Executor, State

HEAD_START_SECONDS = 0.05
"""So long before it has to start a request looks for a place: blocks take a round trip, the present step its time."""


def overtake(state: State, now: float) -> None:
    """Finds places for those that have to start by now. Each looks once. Costs next to nothing where none has to."""
    while (first := state.urgent.peek()) is not None and first[0][0] <= now:
        _take_place(state, state.urgent.pop(), now)


def _take_place(state: State, request: Request, now: float) -> None:
    model, sequence = state.models.get(request.model), request.lead
    if model is None or sequence.line is None or not state.kv_connected:
        return  # it is about to be placed, too late already, or nobody can be
    executors = [e for e in state.serving(request.model) if e.takes and not e.starved]
    if not executors or any(executor.free_sequences > 0 for executor in executors):
        return  # what it lacks is no place
    if not is_feasible(sequence, now, max(prompt_speeds(state, request.model))):
        return
    found = [(e, v) for e in executors if (v := choose_victim(e, _less_urgent(e, request))) is not None]
    if not found:
        return
    executor, victim = min(found, key=lambda f: (f[1][0].request.priority, f[1][1].seconds, f[0].index))
    victim[0].yielded = True
    occasion = f"request {request.request_id} of priority {request.priority} has to start now"
    yield_place(state, executor, victim, now, occasion)
    model.queue.promote(sequence)


def _less_urgent(executor: Executor, request: Request) -> list[Sequence]:
    return [s for s in executor.running.values() if s.request.priority < request.priority and not s.yielded]
