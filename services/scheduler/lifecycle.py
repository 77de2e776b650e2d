"""How sequences enter the queue, take a place on an executor, leave it and end. Every exit frees blocks once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from quire.v1 import executor_pb2, kvmanager_pb2, scheduler_pb2, types_pb2
from services.common.errors import QuireError
from services.scheduler.expected import learn
from services.scheduler.sequence import Phase, Request, Sequence, step_limit
from services.scheduler.state import TARGET_GROUP, Executor, State
from services.scheduler.stays import Leaving, Origin, Stay

UNSENT = 1 << 62
"""Plan that ends a stay, while that plan was not sent yet."""


def enqueue(state: State, sequence: Sequence) -> None:
    """Puts a waiting sequence into its model's queue."""
    state.models[sequence.request.model].queue.push(sequence)
    state.may_admit = True


def release_siblings(state: State, request: Request) -> None:
    """Queues the choices that waited for the lead's prompt: they are forks of it."""
    request.siblings_wait = False
    lead = request.lead
    for sequence in request.sequences[1:]:
        if sequence.phase is Phase.WAITING:
            if lead.executor is not None and sequence.output_length == 0:
                sequence.origin = Origin(lead.executor, lead.sequence_id, request.prompt_length - 1)
            enqueue(state, sequence)


def count_slots(blocks: Iterable[executor_pb2.BlockList], executor: Executor) -> int:
    """Token slots of the target model's blocks."""
    return sum(len(b.block_ids) for b in blocks if b.group_id == TARGET_GROUP) * executor.block_size


def place(
    state: State, sequence: Sequence, executor: Executor, granted: kvmanager_pb2.ReservationResult, now: float
) -> None:
    """Gives a reserving sequence its place; it enters with the executor's next plan."""
    request, stay = sequence.request, sequence.sequence_id
    returns = sequence.preempted
    sequence.move(Phase.RUNNING)
    sequence.preempted = False
    sequence.executor = executor
    stay_record = sequence.stay = _stay(sequence, executor)
    stay_record.add(granted.blocks, granted.demotions)
    sequence.slots_held = sequence.slots_asked = count_slots(granted.blocks, executor)
    sequence.computed_length = sequence.projected_length = granted.cached_tokens
    sequence.note_reported(executor.block_size)
    sequence.answered_at = now
    state.running[stay] = executor.running[stay] = executor.entering[stay] = executor.prefilling[stay] = sequence
    executor.copies.extend(granted.copies)
    if request.beams is not None:
        let_paths_go_on(state, request)
    request.account.grant(sequence, granted.cached_tokens)
    request.account.running_count += 1
    if request.target_gap is not None:
        executor.target_gaps[request.target_gap] += 1
    state.touched[executor] = None
    executor.expected_tokens += sequence.expected_output - sequence.output_length
    counters = executor.counters
    is_prompt = sequence.output_length == 0 or sequence.beam is None  # each step of a search forks what is none
    if is_prompt and not returns:
        counters.prefix_query_tokens += len(sequence.token_ids)
        counters.prefix_hit_tokens += granted.cached_tokens
    if not request.started:
        request.started, request.cached_tokens = True, granted.cached_tokens
        counters.prompt_tokens += request.prompt_length
        request.gateway.outbox.started.append(
            scheduler_pb2.RequestStarted(
                handle=request.handle,
                cached_tokens=granted.cached_tokens,
                queue_ms=(now - request.arrived_at) * 1000,
                model=request.model,
            )
        )
        request.gateway.has_output = True


def let_paths_go_on(state: State, request: Request) -> None:
    """Paths of a search that stay where they are wait for the forks beside them: one step computes them all."""
    for sequence in request.sequences:
        if sequence.executor is not None:
            sequence.executor.small_top_up_due = True
            state.touched[sequence.executor] = None


def _stay(sequence: Sequence, executor: Executor) -> Stay:
    assert executor.description is not None
    return Stay(
        sequence.sequence_id,
        executor.executor_id,
        executor.epoch,
        executor.description.model.fingerprint,
        sequence.request.tenant,
        executor.description.kv_policy,
    )


def leave(state: State, sequence: Sequence) -> None:
    """Takes a running sequence off its executor; its blocks go back once the executor has answered that."""
    executor, stay = _detach(state, sequence)
    if executor.entering.pop(stay, None) is not None:
        state.releases.append(stay)  # no plan ever named it
    else:
        assert sequence.stay is not None
        executor.ended_ids.append(stay)
        executor.leaving[stay] = Leaving(sequence.stay, UNSENT, sequence.token_ids[:], sequence.computed_length)
    sequence.forget_stay()


def leave_ended(state: State, sequence: Sequence) -> None:
    """Takes off a sequence that the executor itself ended: it skips it in later plans, so its blocks are free."""
    _, stay = _detach(state, sequence)
    state.releases.append(stay)
    sequence.forget_stay()


def leave_lost(state: State, sequence: Sequence) -> None:
    """Takes off a sequence whose epoch is over. Nothing is placed on that executor before its next epoch begins."""
    executor, stay = _detach(state, sequence)
    executor.entering.pop(stay, None)
    state.releases.append(stay)
    sequence.forget_stay()


def _detach(state: State, sequence: Sequence) -> tuple[Executor, int]:
    executor, stay = sequence.executor, sequence.sequence_id
    assert executor is not None
    state.touched[executor] = None
    state.may_admit = True
    del state.running[stay], executor.running[stay]
    request = sequence.request
    request.account.running_count -= 1
    if request.target_gap is not None:
        executor.target_gaps -= Counter((request.target_gap,))
    executor.expected_tokens -= sequence.expected_output - sequence.output_length
    for part in (
        executor.prefilling,
        executor.decoding,
        executor.chunking,
        executor.capped,
        executor.starved,
    ):
        part.pop(stay, None)
    executor.appends.pop(stay, None)
    if executor.demotions:
        executor.demotions = [demotion for demotion in executor.demotions if demotion.sequence_id != stay]
    return executor, stay


def requeue(state: State, sequence: Sequence) -> None:
    """Back to the front of the queue with all its tokens, after it left its executor."""
    sequence.move(Phase.WAITING)
    sequence.preempted = True
    if not sequence.rests:
        enqueue(state, sequence)


def wait_again(state: State, sequence: Sequence) -> None:
    """A reservation came to nothing. Its tenant never ceased to wait, so it is queued before it is given back."""
    sequence.move(Phase.WAITING)
    enqueue(state, sequence)
    sequence.request.account.give_back(sequence)
    sequence.forget_stay()
    if sequence.request.beams is not None:
        let_paths_go_on(state, sequence.request)


def abandon(state: State, sequence: Sequence) -> None:
    """Forgets a reservation that was asked for; should it be granted, it goes straight back."""
    state.asked[sequence.sequence_id].sequence = None
    sequence.request.account.give_back(sequence)
    sequence.forget_stay()


def finish(
    state: State,
    sequence: Sequence,
    reason: types_pb2.FinishReason.ValueType,
    *,
    error: types_pb2.ErrorDetail | None = None,
    stop_token_id: int | None = None,
) -> None:
    """Ends a sequence in whatever state it is, and says so to its gateway. Ended ones stay as they are.

    A path of a search does not end alone: its request does.
    """
    if sequence.phase is Phase.ENDED:
        return
    request = sequence.request
    if request.beams is not None:
        _end_request(state, request, reason, error)
        return
    learn(state, sequence, reason)
    retire(state, sequence)
    end_choice(request, sequence.choice, reason, error=error, stop_token_id=stop_token_id)
    if request.siblings_wait and sequence is request.lead:
        release_siblings(state, request)
    if request.ended:
        forget_request(state, request)


def retire(state: State, sequence: Sequence) -> None:
    """Takes a sequence out of whatever state it is in, for good. Its gateway hears nothing of it."""
    if sequence.phase is Phase.RUNNING and sequence.executor is not None:
        leave(state, sequence)
    elif sequence.phase is Phase.RESERVING:
        abandon(state, sequence)
    elif (model := state.models.get(sequence.request.model)) is not None:
        model.queue.remove(sequence)
    sequence.move(Phase.ENDED)
    state.may_admit = True  # behind it in the queue may be one that fits
    state.count_live(sequence.request, -1)


def end_choice(
    request: Request,
    choice: int,
    reason: types_pb2.FinishReason.ValueType,
    *,
    error: types_pb2.ErrorDetail | None = None,
    stop_token_id: int | None = None,
    cumulative_logprob: float | None = None,
) -> None:
    """Tells the gateway of a choice's end."""
    end = scheduler_pb2.ChoiceEnd(
        handle=request.handle,
        choice=choice,
        reason=reason,
        error=error,
        stop_token_id=stop_token_id,
        cumulative_logprob=cumulative_logprob,
    )
    request.gateway.outbox.ended.append(end)
    request.gateway.has_output = True
    if request.keep_seconds:
        request.ends.append(end)


def forget_request(state: State, request: Request) -> None:
    """Drops a request whose choices all ended."""
    request.gateway.requests.pop(request.handle, None)
    state.request_ids.pop((request.tenant, request.request_id), None)


def set_held(state: State, request: Request, held: bool) -> None:
    """Pauses or resumes a request whose client reads slowly."""
    if request.held == held:
        return
    request.held = held
    for sequence in request.sequences:
        sequence.step_limit = step_limit(request)
        if sequence.executor is not None:
            sequence.executor.top_up_due |= not held
            state.touched[sequence.executor] = None  # a search beside what stands still may have to make way


def fail_request(state: State, request: Request, error: QuireError) -> None:
    """Ends every choice of a request with an error."""
    _end_request(state, request, types_pb2.FINISH_REASON_ERROR, error.to_detail())


def cancel_request(state: State, request: Request) -> None:
    """Ends every choice of a request because its client wants no more."""
    _end_request(state, request, types_pb2.FINISH_REASON_CANCELLED, None)


def _end_request(
    state: State, request: Request, reason: types_pb2.FinishReason.ValueType, error: types_pb2.ErrorDetail | None
) -> None:
    if request.beams is None:
        request.siblings_wait = False  # they end as well: the lead's end must not queue them
        for sequence in request.sequences:
            finish(state, sequence, reason, error=error)
    elif not request.ended:
        for sequence in request.sequences:
            retire(state, sequence)
        for choice in range(request.beams.choice_count):
            end_choice(request, choice, reason, error=error)
        forget_request(state, request)
