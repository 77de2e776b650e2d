"""Whether a new request is let into the queue, and when it has to start: limits of the queue, deadlines, targets."""

from __future__ import annotations

from quire.v1 import scheduler_pb2
from services.common.errors import QuireError, Reason
from services.scheduler.policy import Infeasible
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


def start_by(
    submit: scheduler_pb2.Submit,
    arrived_at: float,
    prefill_tokens_per_second: float,
    patience_seconds: float = PATIENCE_SECONDS,
) -> float:
    """When the prompt has to start for its first token to come in time. Seconds; 0 tokens per second is unknown."""
    rate = prefill_tokens_per_second
    compute = len(submit.prompt_token_ids) / rate if rate > 0 else 0.0
    stated = [ms / 1000 - compute for ms in (submit.deadline_ms, submit.target_first_token_ms) if ms]
    return arrived_at + min([*stated, patience_seconds])


def prefill_rate(state: State, model: str) -> float:
    """Prompt tokens per second of all executors that have the model; 0 where it is unknown."""
    return sum(e.description.prefill_tokens_per_second for e in state.serving(model) if e.description is not None)


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
    if waiting + count > limits.max_queued_tenant:
        raise QuireError(
            Reason.QUEUE_FULL,
            f"the queue is full for tenant {submit.tenant!r}: {waiting} of its sequences wait, {count} more would "
            f"exceed the limit of {limits.max_queued_tenant} (max_queued_tenant)",
        )


def check_deadline(state: State, model: Model, request: Request, now: float) -> None:
    """Raises DEADLINE where the operator wants it and the first token is expected after the deadline.

    The estimate takes the queue to move at the speed of prefill: while all room is taken, it is too short.
    """
    if state.limits.infeasible is not Infeasible.REFUSE or request.deadline_at is None:
        return
    rate = prefill_rate(state, request.model)
    if rate <= 0:
        return
    ahead = model.queue.tokens_ahead(request, request.prompt_length, now)
    for executor in state.serving(request.model):
        ahead += sum(len(s.token_ids) - s.computed_length for s in executor.prefilling.values())
    for asked in state.asked.values():
        ahead += len(asked.sequence.token_ids) if asked.model is model and asked.sequence is not None else 0
    seconds, left = (ahead + request.prompt_length) / rate, request.deadline_at - now
    if seconds > left:
        raise QuireError(
            Reason.DEADLINE,
            f"deadline_ms: the first token is expected in {seconds:.2f} s, after the deadline in {left:.2f} s: "
            f"{ahead} tokens are computed before the prompt's {request.prompt_length}, {rate:.0f} a second",
            field="deadline_ms",
        )
