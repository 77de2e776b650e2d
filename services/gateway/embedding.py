"""Requests for a prompt's vector: a generation that stops where output would begin."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

from quire.v1 import gateway_pb2, types_pb2
from services.common.errors import QuireError, Reason
from services.common.limits import check_pooling
from services.gateway.events import Embedded, Event, Finished, Started


@dataclass(frozen=True, slots=True)
class Vector:
    """The answer, whole."""

    request_id: str
    model: str
    values: tuple[float, ...]
    prompt_tokens: int
    headers: Mapping[str, str]  # what the answer tells of the caller's rates


def to_input(request: gateway_pb2.EmbedRequest) -> gateway_pb2.GenerationInput:
    """The request as one for output, of which there will be none."""
    result = gateway_pb2.GenerationInput(
        model=request.model,
        stop=types_pb2.StopCriteria(max_tokens=1, ignore_eos=True),
        priority=request.priority,
        request_id=request.request_id,
        speculation="off",
    )
    kind = request.WhichOneof("prompt")
    if kind == "text":
        result.text = request.text
    elif kind == "token_ids":
        result.token_ids.CopyFrom(request.token_ids)
    return result


def pooling(request: gateway_pb2.EmbedRequest) -> types_pb2.Pooling.ValueType:
    """How the vector is made. INVALID_FIELD."""
    check_pooling(request.pooling)
    return request.pooling or types_pb2.POOLING_LAST


async def collect(events: AsyncIterator[Event]) -> Vector:
    """The vector that a generation ends with."""
    started, embedded = None, None
    async for event in events:
        if isinstance(event, Started):
            started = event
        elif isinstance(event, Embedded):
            embedded = event
        elif isinstance(event, Finished) and started is not None and embedded is not None:
            return Vector(started.request_id, started.model, embedded.values, event.prompt_tokens, started.headers)
    raise QuireError(Reason.INTERNAL, "the answer ended without its vector")
