"""Executors and the kvmanager come and go: what that does to their sequences and to the models on offer."""

from __future__ import annotations

from quire.v1 import types_pb2
from services.common.errors import QuireError, Reason
from services.scheduler.fairness import Ledger
from services.scheduler.lifecycle import fail_request, leave_lost, requeue
from services.scheduler.requests import models_changed
from services.scheduler.slowness import SOUND, Pace
from services.scheduler.state import UNLIMITED, Counters, Executor, Model, State


def executor_opened(
    state: State, executor: Executor, epoch: int, description: types_pb2.ExecutorDescription, now: float
) -> None:
    """A Run stream was welcomed: a new epoch begins, with nothing in it."""
    _lose_epoch(state, executor)
    executor.epoch = epoch
    executor.describe(description, state.limits.speculation)
    executor.connected, executor.stream_failure = True, ""
    executor.step = executor.acknowledged_results = executor.report_credit = 0
    executor.available_blocks, executor.coming_blocks = None, 0
    executor.pace, executor.slowness = Pace(), SOUND
    state.touched[executor] = None
    state.may_admit = True
    _note_models(state, now)
    model = executor.model
    if model is not None:
        executor.counters = state.totals.setdefault((model.name, executor.index), Counters())
        known = state.models[model.name]
        known.window = max(known.window, 1)


def executor_added(state: State, target: str) -> Executor:
    """One more, not connected yet."""
    executor = Executor(next(state.executor_numbers), target)
    state.executors.append(executor)
    return executor


def executor_used_again(state: State, executor: Executor) -> None:
    """One that somebody had taken out takes sequences again."""
    executor.retired = False
    state.may_admit = True


def executor_removed(state: State, executor: Executor, now: float) -> None:
    """It belongs to nobody any more: what runs there goes on elsewhere."""
    executor_lost(state, executor, now)
    state.executors.remove(executor)


def executor_ending(executor: Executor, seconds: float, now: float) -> None:
    """Its process ends once it is empty, or after so many seconds: nothing is placed there any more."""
    executor.ends_at = now + max(0.0, seconds)


def executor_lost(state: State, executor: Executor, now: float) -> None:
    """A Run stream is gone: its sequences go back to the queue with all their tokens."""
    executor.connected, executor.stream_failure = False, ""
    _lose_epoch(state, executor)
    _note_models(state, now)


def kvmanager_opened(state: State) -> None:
    """The kvmanager's stream is up. After a loss, `restate` comes first."""
    state.kv_connected, state.kv_lost_at = True, None
    for model in state.models.values():
        model.window, model.retry_at, model.unplaced_since = UNLIMITED, None, None
    state.may_admit = True


def kvmanager_lost(state: State, now: float) -> None:
    """The kvmanager's stream is gone: running sequences go on within the blocks that they have."""
    state.kv_connected = False
    if state.kv_lost_at is None:
        state.kv_lost_at = now


def forget_model(state: State, name: str, reason: QuireError) -> None:
    """Takes a model off the offer and ends what waits for it."""
    state.models.pop(name, None)
    for request in [r for r in state.request_ids.values() if r.model == name]:
        fail_request(state, request, reason)
    models_changed(state)


def _lose_epoch(state: State, executor: Executor) -> None:
    """Requeues all sequences of an executor. Their blocks are free: the next epoch begins before any is used again."""
    for sequence in list(executor.running.values()):
        leave_lost(state, sequence)
        requeue(state, sequence)
    state.releases.extend(executor.leaving)
    executor.leaving.clear()
    executor.expected_tokens = 0
    executor.ended_ids, executor.sealed, executor.operations, executor.demotions = [], [], [], []
    executor.copies, executor.appends = [], {}
    executor.top_up_due = executor.small_top_up_due = executor.has_space = False
    executor.ends_at = None


def _note_models(state: State, now: float) -> None:
    """Brings the models on offer in line with the executors. One without executors stays for a while."""
    changed = False
    for executor in state.executors:
        model = executor.model
        if model is None or not executor.serves:
            continue
        known = state.models.get(model.name)
        if known is None:
            queue, ledger = state.limits.policy.queue(), Ledger(state.limits.output_cost)
            state.models[model.name] = Model(model, queue, ledger)
            changed = True
            continue
        if known.description != model and (known.lost_at is not None or len(state.serving(model.name)) == 1):
            _replace(state, known, model)
            changed = True
        known.lost_at = None
    for name, known in state.models.items():
        if not state.serving(name) and known.lost_at is None:
            known.lost_at = now
    if changed:
        models_changed(state)


def _replace(state: State, known: Model, model: types_pb2.ModelDescription) -> None:
    """The name now stands for other weights. Sequences are computed anew, unless their ids mean something else now."""
    stale = known.description.tokenizer_fingerprint != model.tokenizer_fingerprint
    known.description = model
    if stale:
        error = QuireError(Reason.EXECUTOR_LOST, f"model {model.name!r} was replaced by one with another tokenizer")
        for request in [r for r in state.request_ids.values() if r.model == model.name]:
            if request.tokenizer_fingerprint != model.tokenizer_fingerprint:
                fail_request(state, request, error)
