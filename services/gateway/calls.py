"""Generations that end with the gRPC call that asked for them: with its deadline, its cancellation, or its reader."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import grpc
from grpc_status import rpc_status

from quire.v1 import gateway_pb2
from services.common.errors import QuireError, Reason
from services.gateway.engine import Engine
from services.gateway.events import Started
from services.gateway.generation import Generation
from services.gateway.guard import caller
from services.gateway.positions import Seen

Context = grpc.aio.ServicerContext[Any, Any]


class Calls:
    """Used by the servicers of all protocols."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._endings: set[asyncio.Task[None]] = set()

    def generate(
        self,
        request: gateway_pb2.GenerationInput,
        context: Context,
        *,
        timeout: float | None = None,
        within: asyncio.Task[Any] | None = None,
        seen: Sequence[Seen] | None = None,
    ) -> Generation:
        """To be called in the task that handles the call. `timeout`: seconds, beside the call's own deadline.

        `within`: the task that handles a call with many requests, which closes their generations by itself.
        """

        def start(deadline: float | None, end: Callable[[], None]) -> Generation:
            return self._engine.generate(request, caller=caller(), deadline=deadline, on_cut=end, seen=seen)

        return self._bind(start, context, timeout, within)

    def embed(self, request: gateway_pb2.EmbedRequest, context: Context) -> Generation:
        """The same for a vector."""

        def start(deadline: float | None, end: Callable[[], None]) -> Generation:
            return self._engine.embed(request, caller=caller(), deadline=deadline, on_cut=end)

        return self._bind(start, context)

    def _bind(
        self,
        start: Callable[[float | None, Callable[[], None]], Generation],
        context: Context,
        timeout: float | None = None,
        within: asyncio.Task[Any] | None = None,
    ) -> Generation:
        handler = within or asyncio.current_task()
        assert handler is not None

        def end() -> None:
            ending = asyncio.create_task(_end(handler, context))
            self._endings.add(ending)
            ending.add_done_callback(self._endings.discard)

        times = [seconds for seconds in (context.time_remaining(), timeout) if seconds is not None]
        generation = start(min(times, default=None), end)
        if within is None:
            context.add_done_callback(lambda _: generation.cancel())  # type: ignore[arg-type]  # a class in the stubs
        return generation


async def tell_rates(started: Started, context: Context) -> None:
    """What the caller's rates have left, as initial metadata."""
    if started.headers:
        await context.send_initial_metadata(tuple(started.headers.items()))


async def _end(handler: asyncio.Task[Any], context: Context) -> None:
    """Ends a handler that cannot write because its client does not read; the status waits behind what was written."""
    handler.cancel()
    error = QuireError(Reason.SLOW_READER, "the client left its tokens unread too long")
    with contextlib.suppress(grpc.aio.AbortError, grpc.RpcError):
        await context.abort_with_status(rpc_status.to_status(error.to_status()))
