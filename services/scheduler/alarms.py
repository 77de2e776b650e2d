"""What happens because time passed: deadlines, lasting losses, retries, stalls. Never on the token path."""

from __future__ import annotations

from services.common.errors import QuireError, Reason
from services.scheduler.epochs import forget_model
from services.scheduler.lifecycle import fail_request
from services.scheduler.orphans import expire
from services.scheduler.sequence import Phase
from services.scheduler.state import Model, State


def next_alarm(state: State) -> float | None:
    """When `ring` has something to do next; None while nothing can happen by itself. May be early."""
    times = [state.stall_check_at]
    first = state.deadlines.peek()
    times.append(first[0][0] if first is not None else None)
    wait = state.limits.resume_seconds
    for model in state.models.values():
        times.append(model.retry_at)
        times.append(model.lost_at + wait if model.lost_at is not None else None)
        times.append(model.unplaced_since + wait if model.unplaced_since is not None else None)
    orphan = state.orphan_ends.peek()
    times.append(orphan[0][0] if orphan is not None else None)
    urgent = state.urgent.peek()
    times.append(urgent[0][0] if urgent is not None else None)
    if state.kv_lost_at is not None and state.live_count:
        times.append(state.kv_lost_at + wait)
    return min((at for at in times if at is not None), default=None)


def ring(state: State, now: float) -> None:
    """Does what is due. Costs next to nothing where nothing is."""
    while (first := state.deadlines.peek()) is not None and first[0][0] <= now:
        fail_request(state, state.deadlines.pop(), QuireError(Reason.DEADLINE, "the deadline passed"))
    while (orphan := state.orphan_ends.peek()) is not None and orphan[0][0] <= now:
        expire(state, state.orphan_ends.pop(), now)
    for name, model in list(state.models.items()):
        model.ledger.mark(now)
        _ring_model(state, name, model, now)
    if state.kv_lost_at is not None and now >= state.kv_lost_at + state.limits.resume_seconds:
        _fail_all(state, QuireError(Reason.KVMANAGER_LOST, "the kvmanager is gone"))
    _check_stalls(state, now)


def _ring_model(state: State, name: str, model: Model, now: float) -> None:
    wait = state.limits.resume_seconds
    if model.lost_at is not None and now >= model.lost_at + wait:
        error = QuireError(Reason.EXECUTOR_LOST, f"no executor has served model {name!r} for {wait:g} s")
        forget_model(state, name, error)
        return
    if model.unplaced_since is not None and now >= model.unplaced_since + wait:
        model.unplaced_since = None
        error = QuireError(Reason.NO_EXECUTOR, f"the kvmanager has known no executor of model {name!r} for {wait:g} s")
        for request in [r for r in state.request_ids.values() if r.model == name]:
            if any(s.phase is Phase.WAITING for s in request.sequences):
                fail_request(state, request, error)
    if model.retry_at is not None and now >= model.retry_at:
        model.retry_at = None
        model.window = max(model.window, 1)
        state.may_admit = True
        for executor in state.serving(name):
            executor.has_space = bool(executor.starved)


def _fail_all(state: State, error: QuireError) -> None:
    for request in list(state.request_ids.values()):
        fail_request(state, request, error)


def _check_stalls(state: State, now: float) -> None:
    """Marks streams as failed where a sequence with credit was not answered for too long."""
    wait, due = state.limits.stall_seconds, state.stall_check_at
    if due is None and any(executor.running for executor in state.touched):
        state.stall_check_at = now + wait
    if due is None or now < due:
        return
    state.stall_check_at = None
    for executor in state.executors:
        if not executor.running or executor.stream_failure:
            continue
        owed = [s.answered_at for s in executor.running.values() if s.granted_steps > 0]
        stalled_at = min(owed, default=now) + wait
        if now >= stalled_at:
            executor.stream_failure = f"no result for {wait:g} s"
        else:
            state.stall_check_at = min(stalled_at, state.stall_check_at or stalled_at)
