"""The engine as both surfaces see it: text in, events out; the scheduler, tokenizers and requests behind it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
import uuid
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from datetime import date

import grpc
from prometheus_client import CollectorRegistry, generate_latest

import quire
from quire.v1 import (
    admin_pb2,
    gateway_pb2,
    kvmanager_pb2,
    scheduler_pb2,
    scheduler_pb2_grpc,
    scheduler_status_pb2,
    types_pb2,
)
from services.common import rpc
from services.common.errors import QuireError, Reason, from_rpc_error, invalid
from services.common.limits import check_ids
from services.gateway import chat_plan, embedding, validation
from services.gateway.caller import Caller
from services.gateway.encoding import Encoder, Prompt
from services.gateway.entrance import Asked, Entrance
from services.gateway.generation import Generation
from services.gateway.journal.shared import SharedJournal
from services.gateway.metrics import GatewayMetrics, ResilienceMetrics
from services.gateway.models import LoadedTokenizer, ModelCatalogue
from services.gateway.output.template_facts import Style, TemplateFacts
from services.gateway.placing.placing import PlacingRules
from services.gateway.positions import Seen
from services.gateway.quota.quota import Quota
from services.gateway.quota.usage import KEPT_DAYS, Row, today
from services.gateway.reading import Reading
from services.gateway.requests import RequestTable
from services.gateway.scheduler_link import SchedulerLinks
from services.gateway.settings import GatewaySettings
from services.gateway.stream import Stream
from services.gateway.watch import Watch

STATUS_SECONDS = 3.0
"""Longer than the scheduler waits for the kvmanager, shorter than callers wait for us."""
DRAIN_LOOK_SECONDS = 0.5
CHANGE_SECONDS = 900.0
"""How long a change of models or executors may take: weights may come from far away."""


class Engine:
    """The client side of the scheduler, used by the gRPC and the HTTP surface alike.

    Failures are raised as `QuireError`. Everything runs on one event loop; tokenization runs in threads.
    """

    def __init__(
        self, settings: GatewaySettings, registry: CollectorRegistry, quota: Quota, journal: SharedJournal | None = None
    ) -> None:
        """`journal` is where other gateways find this one's streams, if anywhere."""
        self.settings, self._registry, self._quota, self._journal = settings, registry, quota, journal
        self._channels = {target: rpc.channel(target, settings) for target in settings.schedulers}
        self._stubs = {
            target: scheduler_pb2_grpc.SchedulerServiceStub(channel) for target, channel in self._channels.items()
        }
        self._encoder = Encoder(settings.encode_threads)
        self._catalogue = ModelCatalogue(self._stub_with, self._encoder)
        self._table = RequestTable()
        self._links = SchedulerLinks(
            self._stubs,
            f"gateway-{uuid.uuid4().hex[:12]}",
            _placing_rules(settings),
            self._take_models,
            self._tell_state,
        )
        self._metrics = GatewayMetrics(registry, lambda: len(self._table))
        registry.register(ResilienceMetrics(self._links.placing))
        if journal is not None:
            journal.on_gone = lambda why: self._links.placing.counts.update((why,))
        self._entrance = Entrance(
            settings,
            self._catalogue,
            self._encoder,
            self._table,
            self._links,
            quota,
            self._metrics,
            journal,
            self._facts_of,
        )
        self._watch = Watch(self._links, self._entrance.streams, settings.slow_reader_seconds)
        self._started_at = time.monotonic()
        self._draining = False
        self._on_ready: Callable[[bool], None] | None = None

    def start(self, on_ready: Callable[[bool], None] | None = None) -> None:
        """Connects in the background; `on_ready` hears of readiness whenever it may have changed."""
        self._on_ready = on_ready
        self._quota.start()
        if self._journal is not None:
            self._journal.start()
        self._links.start()

    @property
    def ready(self) -> bool:
        """Whether a scheduler's stream is up, a model is there and no drain has begun."""
        return self._links.connected and bool(self._catalogue.models) and not self._draining

    def metrics(self) -> bytes:
        """All that the gateway measures, as text for Prometheus."""
        return generate_latest(self._registry)

    def models(self, caller: Caller) -> list[types_pb2.ModelDescription]:
        """The models that a caller can ask for, by name."""
        return [model for model in self._catalogue.models if caller.caps.allows(model.name)]

    def model(self, name: str, caller: Caller) -> types_pb2.ModelDescription:
        """The model of that name, or the only one where the name is empty. MODEL_NOT_FOUND, SCHEDULER_LOST."""
        return self._catalogue.find(name, caller.caps)

    @property
    def uptime(self) -> float:
        """Seconds since the gateway started."""
        return time.monotonic() - self._started_at

    @property
    def open_requests(self) -> int:
        return len(self._table)

    def generate(
        self,
        request: gateway_pb2.GenerationInput,
        /,
        *,
        caller: Caller,
        deadline: float | None,
        on_cut: Callable[[], None] | None = None,
        seen: Sequence[Seen] | None = None,
    ) -> Generation:
        """An async iterator of events: Started, PromptScores where asked for, Deltas, Finished.

        Validation, tokenization and submission happen in the first step, so whatever is wrong with a request is
        raised by the first `anext`. `deadline` is in seconds from now. `cancel()` or `aclose()` ends the reading,
        and so does cancelling a pending `anext`; the request ends with its last reader, or `resume_window` later.
        A request with the id of one that runs, or that is kept, reads that one from its first event on, or behind what
        its client has `seen` of each choice: deltas marked as seen lead up to there. `on_cut` is called when a reader
        that left its tokens unread for `slow_reader_seconds` was cut off and did not come back for its SLOW_READER
        error either.
        """
        return self._begin(request, caller, deadline, on_cut, seen=seen)

    def embed(
        self,
        request: gateway_pb2.EmbedRequest,
        /,
        *,
        caller: Caller,
        deadline: float | None,
        on_cut: Callable[[], None] | None = None,
    ) -> Generation:
        """As `generate`, with the events Started, Embedded, a Delta without output, Finished."""
        pooling = embedding.pooling(request)
        return self._begin(embedding.to_input(request), caller, deadline, on_cut, pooling=pooling)

    def _begin(
        self,
        request: gateway_pb2.GenerationInput,
        caller: Caller,
        deadline: float | None,
        on_cut: Callable[[], None] | None,
        *,
        pooling: types_pb2.Pooling.ValueType = types_pb2.POOLING_UNSPECIFIED,
        seen: Sequence[Seen] | None = None,
    ) -> Generation:
        loop = asyncio.get_running_loop()
        arrived_at = loop.time()
        deadline_at = None if deadline is None else arrived_at + deadline

        asked = Asked(request, caller, arrived_at, deadline_at, seen, pooling)

        async def begin() -> tuple[Stream, Reading]:
            try:
                async with asyncio.timeout_at(deadline_at):
                    opened = await self._entrance.open(asked, draining=self._draining)
            except TimeoutError as error:
                raise QuireError(Reason.DEADLINE, "the deadline passed before the request began") from error
            self._watch.add(generation)
            return opened

        generation = Generation(begin, on_cut)
        return generation

    def abort(self, request_ids: Collection[str], caller: Caller) -> None:
        """Ends requests of the caller's tenant; their readers meet CANCELLED. Ids that are not running do nothing."""
        for stream in self._entrance.streams.named(caller.tenant, request_ids):
            stream.cancel()

    async def cancel(self, request_id: str, *, caller: Caller) -> None:
        """Ends a request of the caller's tenant at once, whoever reads it. NOT_FOUND where none with that id runs."""
        await self._entrance.cancel(caller, request_id)

    async def tokenizer_bundle(self, model: types_pb2.ModelDescription, caller: Caller) -> AsyncIterator[bytes]:
        """The zip that the model's tokenizer is made of, in pieces; its hex SHA-256 is `tokenizer_fingerprint`."""
        self._quota.check_pace(caller)
        async with self._counted(caller):
            async for piece in self._catalogue.bundle(model.tokenizer_fingerprint):
                yield piece

    async def kv_events(self, start: int) -> AsyncIterator[kvmanager_pb2.SubscribeEventsResponse]:
        """Blocks that come and go behind the scheduler, from that sequence number on; 0 for what happens next."""
        try:
            wanted = scheduler_pb2.FollowKvEventsRequest(start_sequence_number=start)
            async for message in self._first.FollowKvEvents(wanted):
                yield message.events
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, Reason.SCHEDULER_LOST) from error

    async def tokenize(
        self, model: str, prompt: Prompt, *, caller: Caller, add_special: bool = True
    ) -> tuple[list[int], types_pb2.ModelDescription]:
        """Token ids of a text or of a chat, as `generate` would make them, and the model they are for."""
        self._quota.check_pace(caller)
        limit = self.settings.max_prompt_bytes
        if isinstance(prompt, str):
            validation.check_text_size("text", (prompt,), limit)
        else:
            validation.check_chat(prompt, limit)
        found = self._catalogue.find(model, caller.caps)
        loaded = await self._catalogue.tokenizer(found)
        if not isinstance(prompt, str):
            chat_plan.check_template(prompt, self._facts_of(loaded))
        async with self._counted(caller):
            return await self._encoder.encode(loaded.tokenizer, prompt, add_bos=add_special), found

    async def detokenize(self, model: str, ids: Sequence[int], *, caller: Caller, skip_special: bool = True) -> str:
        """The text of token ids."""
        self._quota.check_pace(caller)
        found = self._catalogue.find(model, caller.caps)
        if len(ids) > self.settings.max_prompt_bytes:
            raise QuireError(
                Reason.TOO_LARGE, f"token_ids: more than {self.settings.max_prompt_bytes}", field="token_ids"
            )
        check_ids("token_ids", ids, found.vocab_size)
        loaded = await self._catalogue.tokenizer(found)
        async with self._counted(caller):
            return await self._encoder.decode(loaded.tokenizer, ids, skip_special=skip_special)

    async def status(self) -> admin_pb2.GetStatusResponse:
        """State of all services; `scheduler` is absent while it cannot be reached."""
        status = admin_pb2.GetStatusResponse(
            open_request_count=self.open_requests,
            version=quire.__version__,
            uptime_seconds=self.uptime,
        )
        try:
            request = scheduler_status_pb2.GetSchedulerStatusRequest()
            status.scheduler.CopyFrom(await self._first.GetSchedulerStatus(request, timeout=STATUS_SECONDS))
        except grpc.aio.AioRpcError as error:
            if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                raise from_rpc_error(error, Reason.SCHEDULER_LOST) from error
        return status

    async def change_model(
        self, action: scheduler_pb2.ModelAction.ValueType, name: str, source: str
    ) -> list[types_pb2.ModelDescription]:
        """Loads, unloads or reloads a model and answers with the models after it."""
        if action not in scheduler_pb2.ModelAction.values() or not action:
            raise invalid("action", "must be load, unload or reload")
        if not name:
            raise invalid("name", "is required")
        try:
            request = scheduler_pb2.ManageModelRequest(action=action, name=name, source=source)
            return list((await self._first.ManageModel(request, timeout=CHANGE_SECONDS)).models)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, Reason.SCHEDULER_LOST) from error

    async def change_executor(
        self, action: scheduler_pb2.ExecutorAction.ValueType, target: str
    ) -> list[scheduler_status_pb2.ExecutorStatus]:
        """Adds, drains or removes an executor and answers with the executors after it."""
        if action not in scheduler_pb2.ExecutorAction.values() or not action:
            raise invalid("action", "must be add, drain or remove")
        if not target:
            raise invalid("target", "is required")
        try:
            request = scheduler_pb2.ManageExecutorRequest(action=action, target=target)
            return list((await self._first.ManageExecutor(request, timeout=CHANGE_SECONDS)).executors)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, Reason.SCHEDULER_LOST) from error

    async def usage(self, first_day: str, last_day: str) -> list[Row]:
        """What was used on those days, each as YYYY-MM-DD; empty for the last and the present one."""
        last = _day("last_day", last_day) if last_day else today()
        first = _day("first_day", first_day) if first_day else last
        if not 0 <= (last - first).days <= KEPT_DAYS:
            raise invalid("first_day", f"must be 0 to {KEPT_DAYS} days before last_day")
        return await self._quota.usage(first, last)

    async def drain(self) -> None:
        """Refuses new requests with DRAINING and returns when the running ones have ended."""
        self._draining = True
        self._tell_state()
        while len(self._table):
            self._entrance.hand_over()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._table.empty(), DRAIN_LOOK_SECONDS)

    async def stop(self) -> None:
        """Ends what still runs and closes the channel."""
        self._draining = True
        self._watch.stop()
        await self._links.stop()
        for request in self._table:
            request.fail(QuireError(Reason.DRAINING, "the gateway stopped"))
        await self._catalogue.stop()
        self._encoder.stop()
        self._entrance.stop()
        if self._journal is not None:
            await self._journal.stop()
        await self._quota.stop()
        for channel in self._channels.values():
            await channel.close()

    @contextlib.asynccontextmanager
    async def _counted(self, caller: Caller) -> AsyncIterator[None]:
        """Something short that counts as a request without tokens."""
        grant = await self._quota.enter(caller)
        try:
            yield
        finally:
            self._quota.settle(grant, 0)

    @property
    def _first(self) -> scheduler_pb2_grpc.SchedulerServiceAsyncStub:
        """The scheduler that is asked for its state and for changes."""
        return self._stubs[self.settings.schedulers[0]]

    def _stub_with(self, fingerprint: str) -> scheduler_pb2_grpc.SchedulerServiceAsyncStub:
        """A scheduler that has the tokenizer, where one is known."""
        names = self._links.having(fingerprint)
        return self._stubs[names[0]] if names else self._first

    def _facts_of(self, loaded: LoadedTokenizer) -> TemplateFacts:
        """What the model's template shows, or what this gateway was told of it."""
        facts, style = loaded.tokenizer.facts, self.settings.tool_style
        return facts if style == "auto" else dataclasses.replace(facts, style=Style(style))

    def _take_models(self, models: list[types_pb2.ModelDescription]) -> None:
        self._catalogue.update(models)
        self._tell_state()

    def _tell_state(self) -> None:
        if self._on_ready is not None:
            self._on_ready(self.ready)


def _placing_rules(settings: GatewaySettings) -> PlacingRules:
    return PlacingRules(
        resume_seconds=settings.resume_seconds,
        slow_seconds=settings.slow_seconds,
        hedge_seconds=settings.hedge_seconds,
        max_queue_seconds=settings.max_queue_seconds,
        hold_tokens=settings.hold_tokens,
    )


def _day(field: str, text: str) -> date:
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise invalid(field, f"{text[:40]!r} is no day as YYYY-MM-DD") from None
