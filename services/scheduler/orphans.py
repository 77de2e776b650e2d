"""Requests that outlive their gateway's stream for a while, and gateways that take requests over. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from quire.v1 import scheduler_pb2, types_pb2
from services.common.errors import QuireError, Reason
from services.scheduler.lifecycle import cancel_request, set_held
from services.scheduler.sequence import Phase, Request
from services.scheduler.state import Gateway, State

ERROR = types_pb2.FINISH_REASON_ERROR


def keep_seconds(submit: scheduler_pb2.Submit) -> float:
    """Seconds that a request goes on without a gateway: none where it tells more than tokens, which is kept nowhere."""
    scores = submit.logprobs.HasField("output_count") or submit.logprobs.HasField("prompt_count")
    return 0.0 if scores or submit.beam_width or submit.pooling else submit.keep_ms / 1000


def leave_behind(state: State, gateway: Gateway, now: float) -> None:
    """A stream ended: what somebody may attach to goes on, the rest is cancelled. Nobody attaches to what drains."""
    for request in list(gateway.requests.values()):
        if request.keep_seconds > 0 and not state.draining:
            _orphan(state, request, now)
        else:
            cancel_request(state, request)


def attach(state: State, gateway: Gateway, asked: scheduler_pb2.Attach) -> None:
    """Gives a request to a gateway, with all that it lacks. What cannot be given ends, and NOT_FOUND is told."""
    key = asked.tenant, asked.request_id
    request = state.request_ids.get(key) or state.orphans.get(key)
    if request is not None:
        _take_away(state, request)
        if not _can_move(request, asked):
            cancel_request(state, request)
            request = None
    if request is None:
        refusal = QuireError(Reason.NOT_FOUND, f"request_id: no request {asked.request_id} can be taken over")
        refuse(gateway, asked.handle, (0,), refusal)
        return
    request.gateway, request.handle = gateway, asked.handle
    set_held(state, request, False)
    if not request.ended:
        gateway.requests[request.handle] = request
    gateway.has_output = True
    if request.started:
        gateway.outbox.started.append(started(request))
    for sequence in request.sequences:
        position = asked.next_positions[sequence.choice]
        if ids := sequence.token_ids[request.prompt_length + position :]:
            gateway.say_tokens(request.handle, sequence.choice, position, ids)
    for end in request.ends:
        end.handle = request.handle
        gateway.outbox.ended.append(end)


def expire(state: State, request: Request, now: float) -> None:
    """Ends a request for which no gateway came in time."""
    if request.kept_until is not None and request.kept_until <= now:
        _forget(state, request)
        cancel_request(state, request)


def end_all(state: State) -> None:
    """The scheduler takes no more: nobody waits for requests without a gateway."""
    for request in list(state.orphans.values()):
        _forget(state, request)
        cancel_request(state, request)


def drop_ended(state: State, tenant: str, request_id: str) -> None:
    """A new request has the id of one that ended without a gateway."""
    if (request := state.orphans.get((tenant, request_id))) is not None:
        _forget(state, request)


def started(request: Request) -> scheduler_pb2.RequestStarted:
    """What a gateway hears once a prompt was placed, less the time in the queue."""
    return scheduler_pb2.RequestStarted(handle=request.handle, cached_tokens=request.cached_tokens, model=request.model)


def refuse(gateway: Gateway, handle: int, choices: Iterable[int], error: QuireError) -> None:
    """Tells a gateway that choices of a handle failed."""
    detail = error.to_detail()
    for choice in choices:
        gateway.outbox.ended.append(scheduler_pb2.ChoiceEnd(handle=handle, choice=choice, reason=ERROR, error=detail))
    gateway.has_output = True


def _orphan(state: State, request: Request, now: float) -> None:
    nobody = Gateway("", open=False)  # what is said to it is said again to whoever attaches
    nobody.requests[request.handle] = request
    request.gateway = nobody
    request.kept_until = now + request.keep_seconds
    state.orphans[request.tenant, request.request_id] = request
    state.orphan_ends.push((request.kept_until, request.arrival), request)


def _take_away(state: State, request: Request) -> None:
    """Nobody has the request any more; a gateway that is there hears so."""
    _forget(state, request)
    holder = request.gateway
    holder.requests.pop(request.handle, None)
    if holder.open:
        taken = QuireError(Reason.TAKEN_OVER, "another gateway has taken the request over")
        running = [sequence.choice for sequence in request.sequences if sequence.phase is not Phase.ENDED]
        refuse(holder, request.handle, running, taken)
    request.gateway = Gateway("", open=False)


def _can_move(request: Request, asked: scheduler_pb2.Attach) -> bool:
    """Whether the scheduler has all that the other gateway may lack."""
    positions = asked.next_positions
    return request.keep_seconds > 0 and len(request.sequences) == len(positions) and min(positions) >= 0


def _forget(state: State, request: Request) -> None:
    request.kept_until = None
    if state.orphans.get((request.tenant, request.request_id)) is request:
        del state.orphans[request.tenant, request.request_id]
