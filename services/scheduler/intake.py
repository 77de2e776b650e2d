"""Whether a new request is let into the queue, and when it has to start: limits of the queue, deadlines, targets."""

from __future__ import annotations

import math

from quire.v1 import scheduler_pb2
from services.common.errors import QuireError, Reason
from services.scheduler.room import asked_tokens
from services.scheduler.sequence import Request
from services.scheduler.state import Model, State

PATIENCE_SECONDS = 10.0
"""What states no time has to start so long after it arrived: urgent work overtakes it for no longer."""


LONG_OUTPUT_TOKENS = 512
"""An answer of so many tokens is a long one; a shorter one has to start earlier, in proportion, by half at most."""


def patience(output_tokens: int) -> float:
    """Seconds that an answer of so many tokens may wait where no time is stated: short ones overtake long ones.

    Only those of their own tenant, for what tenants get is settled before; none that stated a near time; and nobody is
    overtaken for long.
    """
    return PATIENCE_SECONDS * (1 + min(1.0, output_tokens / LONG_OUTPUT_TOKENS)) / 2


def must_start(state: State, submit: scheduler_pb2.Submit, model: str, arrived_at: float) -> float | None:
    """When the prompt has to start, in seconds, for its first token to come in the time that the client states.

    None where it states none.
    """
    stated = [ms / 1000 for ms in (submit.deadline_ms, submit.target_first_token_ms) if ms]
    if not stated:
        return None
    speed = max(prompt_speeds(state, model), default=math.inf)
    return arrived_at + min(stated) - len(submit.prompt_token_ids) / speed


def prompt_speeds(state: State, model: str) -> list[float]:
    """Tokens of prefill per second of each executor that takes sequences of a model, as its steps say."""
    return [executor.step_time.prompt_speed for executor in state.serving(model) if executor.takes]


def check_room(state: State, submit: scheduler_pb2.Submit) -> None:
    """Raises QUEUE_FULL where the queue has no room for all choices or paths of a request."""
    limits = state.limits
    count = max(submit.choice_count, submit.beam_width)
    if state.waiting_count + count > limits.max_queued:
        raise QuireError(
            Reason.QUEUE_FULL,
            f"the queue is full: {state.waiting_count} sequences wait, {count} more would exceed the limit of "
            f"{limits.max_queued} (max_queued)",
        )
    waiting = sum(model.ledger.waiting_count(submit.tenant) for model in state.models.values())
    most, name = limits.max_queued_tenant, "max_queued_tenant"
    if submit.queue_share and (part := max(1, int(submit.queue_share * limits.max_queued))) < most:
        most, name = part, "queue_share"
    if waiting + count > most:
        raise QuireError(
            Reason.QUEUE_FULL,
            f"the queue is full for tenant {submit.tenant!r}: {waiting} of its sequences wait, {count} more would "
            f"exceed the limit of {most} ({name})",
        )


def check_deadline(state: State, model: Model, request: Request, now: float) -> None:
    """Raises DEADLINE where the operator wants it and the first token is expected after the deadline.

    The estimate takes the queue to move at the speed of prefill: while all room is taken, it is too short.
    """
    if state.limits.infeasible != "refuse" or request.deadline_at is None:
        return
    speeds = prompt_speeds(state, request.model)
    if not speeds:
        return
    ahead = model.queue.tokens_ahead(request, request.prompt_length, now) + asked_tokens(state, model)
    for executor in state.serving(request.model):
        ahead += sum(len(s.token_ids) - s.computed_length for s in executor.prefilling.values())
    rate = sum(speeds)
    seconds, left = ahead / rate + request.prompt_length / max(speeds), request.deadline_at - now
    if seconds > left:
        raise QuireError(
            Reason.DEADLINE,
            f"deadline_ms: the first token is expected in {seconds:.2f} s, after the deadline in {left:.2f} s: "
            f"{ahead} tokens are computed before the prompt's {request.prompt_length}, {rate:.0f} a second",
            field="deadline_ms",
        )
