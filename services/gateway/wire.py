"""Events as messages of the public API."""

from __future__ import annotations

from collections.abc import Iterable

from quire.v1 import admin_pb2, gateway_pb2, types_pb2
from services.gateway.call_ids import call_id
from services.gateway.events import Delta, Finished, ScoredToken, Started, parts_of
from services.gateway.output.parts import (
    CALL_PARTS,
    CallArguments,
    CallBegin,
    CallFault,
    CallPart,
    Part,
    fold,
    reasoning_of,
)
from services.gateway.quota.usage import Row


def scored_token(token: ScoredToken) -> gateway_pb2.TokenLogprob:
    """`logprob` stays absent for the first prompt token."""
    return gateway_pb2.TokenLogprob(
        token_id=token.token_id,
        token=token.token,
        logprob=token.logprob,
        rank=token.rank,
        top=map(scored_token, token.top),
    )


def scored_tokens(tokens: Iterable[ScoredToken] | None) -> list[gateway_pb2.TokenLogprob]:
    return [scored_token(token) for token in tokens or ()]


def usage(finished: Finished) -> types_pb2.Usage:
    return types_pb2.Usage(
        prompt_tokens=finished.prompt_tokens,
        completion_tokens=finished.completion_tokens,
        cached_tokens=finished.cached_tokens,
        reasoning_tokens=finished.reasoning_tokens or 0,
    )


def usage_row(row: Row) -> admin_pb2.UsageRow:
    return admin_pb2.UsageRow(
        day=row.day.isoformat(),
        tenant=row.tenant,
        model=row.model,
        request_count=row.requests,
        prompt_tokens=row.prompt_tokens,
        cached_tokens=row.cached_tokens,
        output_tokens=row.output_tokens,
    )


def stream_response(started: Started, delta: Delta) -> gateway_pb2.GenerateStreamResponse:
    return gateway_pb2.GenerateStreamResponse(
        request_id=started.request_id,
        model=started.model,
        choice=delta.choice,
        text=delta.text,
        reasoning=reasoning_of(delta.parts or ()),
        tool_calls=(
            _call_delta(started, delta.choice, part) for part in delta.parts or () if isinstance(part, CALL_PARTS)
        ),
        token_ids=delta.token_ids,
        logprobs=scored_tokens(delta.logprobs),
        finish_reason=delta.finish_reason or types_pb2.FINISH_REASON_UNSPECIFIED,
        matched_stop=delta.matched_stop or "",
        matched_token_id=delta.matched_token_id,
        cumulative_logprob=delta.cumulative_logprob,
    )


def _call_delta(started: Started, choice: int, part: CallPart) -> gateway_pb2.ToolCallDelta:
    match part:
        case CallBegin():
            name = call_id(started, choice, part.index)
            return gateway_pb2.ToolCallDelta(index=part.index, id=name, name=part.name)
        case CallArguments():
            return gateway_pb2.ToolCallDelta(index=part.index, arguments=part.text)
        case CallFault():
            return gateway_pb2.ToolCallDelta(index=part.index, fault=part.text)


class ChoiceParts:
    """Collects one choice's deltas into a whole."""

    def __init__(self, choice: int) -> None:
        self._whole = gateway_pb2.GeneratedChoice(choice=choice)
        self._parts: list[Part] = []

    def add(self, delta: Delta) -> None:
        self._parts += parts_of(delta)
        self._whole.token_ids.extend(delta.token_ids)
        self._whole.logprobs.extend(scored_tokens(delta.logprobs))
        if delta.finish_reason is not None:
            self._whole.finish_reason = delta.finish_reason
            self._whole.matched_stop = delta.matched_stop or ""
            if delta.matched_token_id is not None:
                self._whole.matched_token_id = delta.matched_token_id
            if delta.cumulative_logprob is not None:
                self._whole.cumulative_logprob = delta.cumulative_logprob

    def whole(self, started: Started) -> gateway_pb2.GeneratedChoice:
        message = fold(self._parts)
        self._whole.text, self._whole.reasoning = message.text, message.reasoning
        for call in message.calls:
            name = call_id(started, self._whole.choice, call.index)
            self._whole.tool_calls.add(id=name, name=call.name, arguments=call.arguments)
        return self._whole
