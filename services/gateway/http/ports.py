"""What the HTTP surface needs from the rest of the gateway."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Protocol

from quire.v1 import gateway_pb2, types_pb2
from services.gateway.caller import Caller
from services.gateway.events import Event
from services.gateway.positions import Seen


class Generation(Protocol):
    """The events of one running request; `aclose` ends it and frees what it held."""

    def __aiter__(self) -> AsyncIterator[Event]: ...
    def __anext__(self) -> Awaitable[Event]: ...
    def aclose(self) -> Awaitable[None]: ...


class Engine(Protocol):
    """The engine as HTTP sees it. Failures are raised as `QuireError`."""

    @property
    def ready(self) -> bool: ...

    def metrics(self) -> bytes: ...

    def models(self, caller: Caller) -> list[types_pb2.ModelDescription]: ...

    def generate(
        self,
        request: gateway_pb2.GenerationInput,
        /,
        *,
        caller: Caller,
        deadline: float | None,
        on_cut: Callable[[], None] | None = None,
        seen: Sequence[Seen] | None = None,
    ) -> Generation: ...

    def model(self, name: str, caller: Caller) -> types_pb2.ModelDescription: ...

    def embed(
        self,
        request: gateway_pb2.EmbedRequest,
        /,
        *,
        caller: Caller,
        deadline: float | None,
        on_cut: Callable[[], None] | None = None,
    ) -> Generation: ...

    async def cancel(self, request_id: str, *, caller: Caller) -> None: ...

    async def tokenize(
        self, model: str, prompt: str | gateway_pb2.Chat, *, caller: Caller, add_special: bool = True
    ) -> tuple[list[int], types_pb2.ModelDescription]: ...

    async def detokenize(self, model: str, ids: Sequence[int], *, caller: Caller, skip_special: bool = True) -> str: ...


class HttpSettings(Protocol):
    """The settings that concern HTTP."""

    @property
    def http_listen(self) -> str: ...
    @property
    def max_body_bytes(self) -> int: ...
    @property
    def drain_seconds(self) -> float: ...
