"""What gateways ask for: new requests, stops, pauses, cancels."""

from __future__ import annotations

from quire.v1 import scheduler_pb2, types_pb2
from services.common.errors import QuireError, Reason
from services.common.limits import MAX_CHOICES
from services.common.speculation import most_drafts
from services.scheduler import beams, orphans
from services.scheduler.decisions import Decision
from services.scheduler.expected import expect, expect_of
from services.scheduler.intake import check_deadline, check_room, must_start, patience
from services.scheduler.lifecycle import cancel_request, enqueue, finish, forget_request, set_held
from services.scheduler.overtake import HEAD_START_SECONDS
from services.scheduler.routing import refresh_aliases, resolve
from services.scheduler.sequence import Phase, Request, Sequence, step_limit
from services.scheduler.speculation.acceptance import Habit
from services.scheduler.state import Gateway, Model, State
from services.scheduler.validation import check_submit

STOP, LENGTH, ERROR = types_pb2.FINISH_REASON_STOP, types_pb2.FINISH_REASON_LENGTH, types_pb2.FINISH_REASON_ERROR


def serve(state: State, gateway: Gateway, message: scheduler_pb2.ServeRequest, now: float) -> None:
    """Takes one message of a gateway. What is wrong with one request ends that request only."""
    for submit in message.submits:
        try:
            _submit(state, gateway, submit, now)
        except QuireError as error:
            state.refusals[error.reason.name] += 1
            why = f"{error.reason.name}: {error.message}"
            state.decisions.add(Decision(now, "refused", submit.request_id, 0, submit.tenant, submit.model, why))
            orphans.refuse(gateway, submit.handle, range(max(1, min(submit.choice_count, MAX_CHOICES))), error)
    for attach in message.attaches:
        orphans.attach(state, gateway, attach)
    # Of a handle that is unknown below, the end is on its way to the gateway.
    for stop in message.stops:
        _stop_at(state, gateway.requests.get(stop.handle), stop.choice)
    for hold in message.holds:
        if (request := gateway.requests.get(hold.handle)) is not None:
            set_held(state, request, hold.held)
    for cancel in message.cancels:
        if (request := gateway.requests.get(cancel.handle)) is not None:
            cancel_request(state, request)


def open_gateway(state: State, gateway_id: str, now: float) -> Gateway:
    """Opens a gateway's stream. It takes the place of an older one of the same gateway, which is closed."""
    for older in [g for g in state.gateways if g.gateway_id == gateway_id]:
        close_gateway(state, older, now)
    gateway = Gateway(gateway_id)
    state.gateways.append(gateway)
    say_models(state, gateway)
    return gateway


def close_gateway(state: State, gateway: Gateway, now: float) -> None:
    """Cancels the requests of a stream that is gone, or leaves them for others to attach to. Idempotent."""
    if not gateway.open:
        return
    gateway.open = False
    state.gateways.remove(gateway)
    orphans.leave_behind(state, gateway, now)


def models_changed(state: State) -> None:
    """Tells all gateways which models can be asked for now."""
    refresh_aliases(state)
    for gateway in state.gateways:
        say_models(state, gateway)


def say_models(state: State, gateway: Gateway) -> None:
    """Tells a gateway which models can be asked for."""
    del gateway.outbox.models[:]
    gateway.outbox.models.extend(state.models[name].description for name in sorted(state.models))
    gateway.outbox.models.extend(description for _, description in state.offered_aliases.values())
    gateway.outbox.models_changed = gateway.has_output = True


def _submit(state: State, gateway: Gateway, submit: scheduler_pb2.Submit, now: float) -> None:
    if submit.handle in gateway.requests:
        raise QuireError(Reason.ALREADY_EXISTS, f"handle: {submit.handle} is in use on this stream")
    if (submit.tenant, submit.request_id) in state.request_ids:
        raise QuireError(Reason.ALREADY_EXISTS, f"request_id: {submit.request_id} is running")
    name = resolve(state, submit, now)
    model = state.models.get(name)
    if model is None:
        raise QuireError(Reason.MODEL_NOT_FOUND, f"model: {submit.model!r} is not loaded")
    check_submit(submit, model.description)
    resumes = len(submit.progress) > 0  # it was let in before: turning it away now would break a running answer
    if not resumes and state.draining:
        raise QuireError(Reason.DRAINING, "the scheduler is shutting down")
    if not resumes:
        check_room(state, submit)
    search = None
    if submit.beam_width:
        submit, search = beams.begin(submit, model.description)
    must_start_at = must_start(state, submit, name, now)
    may_start_at = now + patience(expect_of(state, submit, name))
    request = Request(
        gateway=gateway,
        handle=submit.handle,
        request_id=submit.request_id,
        model=name,
        alias=submit.model if submit.model != name else "",
        tokenizer_fingerprint=model.description.tokenizer_fingerprint,
        tenant=submit.tenant,
        priority=submit.priority,
        sampling=submit.sampling,
        stop=submit.stop,
        logprobs=submit.logprobs,
        constraint=submit.constraint if submit.HasField("constraint") else None,
        traceparent=submit.traceparent,
        pooling=submit.pooling,
        prompt_length=len(submit.prompt_token_ids),
        arrival=next(state.arrivals),
        arrived_at=now,
        deadline_at=now + submit.deadline_ms / 1000 if submit.deadline_ms else None,
        start_by=may_start_at if must_start_at is None else min(must_start_at, may_start_at),
        must_start_at=must_start_at,
        target_gap=submit.target_token_gap_ms / 1000 if submit.target_token_gap_ms else None,
        account=model.ledger.open(submit.tenant, submit.tenant_weight or 1.0, now),
        keep_seconds=orphans.keep_seconds(submit),
        beams=search,
    )
    if not resumes:
        check_deadline(state, model, request, now)
    orphans.drop_ended(state, submit.tenant, submit.request_id)
    _add_sequences(state, request, submit, model)
    gateway.requests[request.handle] = request
    state.request_ids[request.tenant, request.request_id] = request
    for sequence in request.sequences:
        _settle(state, sequence, model)
    if request.ended:  # nothing was left to compute
        forget_request(state, request)
        return
    if request.deadline_at is not None:
        state.deadlines.push((request.deadline_at, request.arrival), request)
    if request.must_start_at is not None and state.limits.policy.overtakes:
        state.urgent.push((request.must_start_at - HEAD_START_SECONDS, request.arrival), request)
    request.siblings_wait = request.lead.phase is Phase.WAITING and len(request.sequences) > 1
    for sequence in request.sequences[:1] if request.siblings_wait else request.sequences:
        if sequence.phase is Phase.WAITING:
            enqueue(state, sequence)


def _add_sequences(state: State, request: Request, submit: scheduler_pb2.Submit, model: Model) -> None:
    """One sequence per choice that has not ended; the lead alone scores the prompt."""
    progress = {p.choice: p for p in submit.progress}
    for choice in range(submit.choice_count):
        known = progress.get(choice)
        if known is not None and known.ended:
            continue
        request.sequences.append(
            Sequence(
                request=request,
                choice=choice,
                token_ids=submit.prompt_token_ids[:] + (known.token_ids[:] if known is not None else []),
                length_limit=request.prompt_length + submit.stop.max_tokens - 1,
                step_limit=step_limit(request),
                habit=Habit(most_drafts(submit)),
                wants_prompt_scores=submit.logprobs.HasField("prompt_count") and not request.sequences,
            )
        )
    if request.beams is not None:
        beams.set_out(request)
    for sequence in request.sequences:
        expect(state, sequence)
    state.count_live(request, len(request.sequences))


def _settle(state: State, sequence: Sequence, model: Model) -> None:
    """Ends a resumed sequence whose last token had ended it, where that word was lost on the way."""
    stop, length = sequence.request.stop, sequence.output_length
    if length == 0:
        return
    last = sequence.token_ids[-1]
    ends = last in stop.stop_token_ids or (not stop.ignore_eos and last in model.description.eos_token_ids)
    if ends and length > stop.min_tokens:
        finish(state, sequence, STOP, stop_token_id=last)
    elif length >= stop.max_tokens:
        finish(state, sequence, LENGTH)


def _stop_at(state: State, request: Request | None, choice: int) -> None:
    if request is None or request.beams is not None:
        return  # a search has no stop strings
    for sequence in request.sequences:
        if sequence.choice == choice:
            finish(state, sequence, STOP)
