"""What the predictor of lengths says of sequences and executors, and what it learns when they end."""

from __future__ import annotations

from quire.v1 import scheduler_pb2, types_pb2
from services.scheduler.predict import Kind, LengthPredictor
from services.scheduler.sequence import Request, Sequence
from services.scheduler.state import State

STOP, LENGTH, CANCELLED = (
    types_pb2.FINISH_REASON_STOP,
    types_pb2.FINISH_REASON_LENGTH,
    types_pb2.FINISH_REASON_CANCELLED,
)


def expect_output(predictor: LengthPredictor, kind: Kind, stop: types_pb2.StopCriteria, length: int = 0) -> int:
    """Output tokens in all of a choice that has `length` of them."""
    if _is_forced(stop):
        return stop.max_tokens
    return max(predictor.expect(kind, length, stop.max_tokens), min(stop.min_tokens + 1, stop.max_tokens))


def expect_of(state: State, submit: scheduler_pb2.Submit, name: str) -> int:
    """Output tokens in all of a choice of a new request, where `name` (a model or an alias) answers it."""
    return expect_output(state.predictor, Kind(submit.tenant, name, len(submit.prompt_token_ids)), submit.stop)


def expect(state: State, sequence: Sequence) -> None:
    """Says how long a sequence's output will be, or says it anew where it outlived that."""
    request = sequence.request
    before = sequence.expected_output
    kind = Kind(request.tenant, request.model, request.prompt_length)
    sequence.expected_output = expect_output(state.predictor, kind, request.stop, sequence.output_length)
    if sequence.executor is not None:
        sequence.executor.expected_tokens += sequence.expected_output - before


def learn(state: State, sequence: Sequence, reason: types_pb2.FinishReason.ValueType) -> None:
    """Takes in how long a choice became. A budget that had to be used up says nothing of others."""
    request = sequence.request
    if _is_forced(request.stop):
        return
    learned = {STOP: state.predictor.ended, LENGTH: state.predictor.cut, CANCELLED: state.predictor.cut}.get(reason)
    if learned is not None:
        for kind in _kinds(request):
            learned(kind, sequence.output_length)


def _is_forced(stop: types_pb2.StopCriteria) -> bool:
    """Whether nothing but the budget or the client ends the output."""
    return stop.ignore_eos and not stop.stop and not stop.stop_token_ids


def _kinds(request: Request) -> list[Kind]:
    """What was asked for and what computed it, where an alias stood between them."""
    names = [request.model, request.alias] if request.alias else [request.model]
    return [Kind(request.tenant, name, request.prompt_length) for name in names]
