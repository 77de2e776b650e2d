"""A default output budget gives way to the context; one that the client stated does not."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from quire.v1.gateway_pb2 import GenerationInput
from services.common.errors import QuireError, Reason
from services.gateway.events import Event
from services.gateway.http.ports import Generation


async def generate_within_context(
    generate: Callable[[GenerationInput], Generation], request: GenerationInput
) -> AsyncGenerator[Event, None]:
    """The events of `request`; where its budget exceeds what the context leaves, of the same without a budget."""
    generation = generate(request)
    try:
        first = await anext(generation)
    except QuireError as error:
        exceeds = error.reason is Reason.CONTEXT_EXCEEDED and error.field == "stop.max_tokens"
        if not exceeds and error.reason not in (Reason.ALREADY_EXISTS, Reason.NOT_FOUND):  # it may run without a budget
            raise
        request.stop.ClearField("max_tokens")
        generation = generate(request)
        first = await anext(generation)
    async with aclosing(generation):
        yield first
        async for event in generation:
            yield event
