"""The engine as both surfaces see it: text in, events out; the scheduler, tokenizers and requests behind it."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Sequence

import grpc
from prometheus_client import CollectorRegistry

import quire
from quire.v1 import gateway_pb2, scheduler_pb2, scheduler_pb2_grpc, types_pb2
from services.common import rpc
from services.common.errors import QuireError, Reason, from_rpc_error, invalid
from services.gateway import validation
from services.gateway.generation import Generation
from services.gateway.metrics import GatewayMetrics
from services.gateway.models import ModelCatalogue
from services.gateway.requests import RequestTable
from services.gateway.scheduler_link import SchedulerLink
from services.gateway.settings import GatewaySettings

log = logging.getLogger("quire.gateway")


class Engine:
    """The client side of the scheduler, used by the gRPC and the HTTP surface alike.

    Failures are raised as `QuireError`. Everything runs on one event loop; tokenization runs in threads.
    """

    def __init__(self, settings: GatewaySettings, registry: CollectorRegistry) -> None:
        self.settings = settings
        self._channel = rpc.channel(settings.scheduler, settings)
        self._scheduler = scheduler_pb2_grpc.SchedulerServiceStub(self._channel)
        self._catalogue = ModelCatalogue(self._scheduler, settings.encode_threads)
        self._table = RequestTable()
        self._link = SchedulerLink(
            self._scheduler, f"gateway-{uuid.uuid4().hex[:12]}", self._table, self._catalogue, settings.resume_seconds
        )
        self._metrics = GatewayMetrics(registry, lambda: len(self._table))
        self._started_at = time.monotonic()
        self._draining = False
        self._on_ready: Callable[[bool], None] = lambda ready: None

    async def start(self, on_ready: Callable[[bool], None]) -> None:
        """Connects in the background; `on_ready` is called whenever readiness changes."""

    @property
    def ready(self) -> bool:
        """Whether the scheduler's stream is up, a model is there and no drain has begun."""

    def models(self) -> list[types_pb2.ModelDescription]:
        """The models that can be asked for, by name."""

    def find_model(self, name: str) -> types_pb2.ModelDescription:
        """The model of that name; the only one where the name is empty. MODEL_NOT_FOUND, SCHEDULER_LOST."""

    def generate(
        self,
        request: gateway_pb2.GenerationInput,
        *,
        tenant: str,
        deadline: float | None,
        on_cut: Callable[[], None] | None = None,
    ) -> Generation:
        """An async iterator of events: Started, PromptScores where asked for, Deltas, Finished.

        Validation, tokenization and submission happen in the first step, so whatever is wrong with a request is
        raised by the first `anext`. `deadline` is in seconds from now. `cancel()` or `aclose()` ends the request.
        `on_cut` is called when a reader that stalled was cut off and did not come back for its error either.
        """

    async def tokenize(
        self, model: str, prompt: str | Sequence[gateway_pb2.ChatMessage], *, add_special: bool = True
    ) -> tuple[list[int], types_pb2.ModelDescription]:
        """Token ids of a text or of a chat, as `generate` would make them, and the model they are for."""

    async def detokenize(self, model: str, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of token ids."""

    async def status(self) -> gateway_pb2.GetStatusResponse:
        """State of all services; `scheduler` is absent while it cannot be reached."""

    async def change_model(
        self, action: scheduler_pb2.ModelAction.ValueType, name: str, source: str
    ) -> list[types_pb2.ModelDescription]:
        """Loads, unloads or reloads a model and answers with the models after it."""

    async def drain(self) -> None:
        """Refuses new requests with DRAINING and returns when the running ones have ended."""

    async def stop(self) -> None:
        """Ends what still runs and closes the channel."""
