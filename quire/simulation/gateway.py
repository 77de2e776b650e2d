"""Clients and their gateway in one: requests go out as a load says, and what comes back is measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quire.simulation.load import Asked, Load, Prompts, Tenant
from quire.simulation.measures import Measures, Open
from quire.simulation.service import Service
from quire.simulation.timeline import Timeline
from quire.v1 import scheduler_pb2, types_pb2

ERROR = types_pb2.FINISH_REASON_ERROR


class SimulatedGateway(Service):
    """Sends the requests of a load, each with one choice."""

    def __init__(
        self,
        timeline: Timeline,
        load: Load,
        tenants: Sequence[Tenant],
        prompts: Prompts,
        max_tokens: int | None,
        measures: Measures,
        message_seconds: float,
        stolen: Callable[[float], None],
    ) -> None:
        """`max_tokens`: what clients allow of an answer; None: as much as it will have."""
        super().__init__(timeline, message_seconds, stolen)
        self.measures = measures
        self.send: Callable[[scheduler_pb2.ServeRequest, float], None] = lambda message, delay: None
        self.model = ""
        self.open: dict[int, Open] = {}  # by handle
        self.on_end: Callable[[], object] = lambda: None
        self.is_done = not len(load)
        self._load = load
        self._coming = iter(load)
        self._next = next(self._coming, None)
        self._tenants = tenants
        self._prompts = prompts
        self._max_tokens = max_tokens
        self._message_seconds = message_seconds
        self._outbox = scheduler_pb2.ServeRequest()

    def start(self) -> None:
        """Lets the load begin."""
        if self._load.concurrency is None:
            self._arrive_due()
        for _ in range(self._load.concurrency or 0):
            self._arrive_now()

    def receive(self, message: scheduler_pb2.ServeResponse) -> None:
        """A message of the scheduler arrives."""
        self.post(self._take, message)

    def act(self, now: float, spent: float) -> None:
        if self._outbox.submits:
            self.send(self._outbox, spent)
            self._outbox = scheduler_pb2.ServeRequest()

    def _arrive_due(self) -> None:
        """Those whose time has come arrive, and the next one will."""
        while self._next is not None and self._next.arrival <= self.timeline.now:
            self._arrive_now()
        if self._next is not None:
            self.timeline.at(self._next.arrival, self._arrive_due)

    def _arrive_now(self) -> None:
        asked, self._next = self._next, next(self._coming, None)
        if asked is None:
            return
        self.post(self._submit, asked)
        request = Open(self.timeline.now, asked.prompt_tokens, asked.tenant)
        self.open[asked.number + 1] = request
        self.measures.arrived(request, self.timeline.now)

    def _submit(self, asked: Asked, now: float) -> None:
        tenant = self._tenants[asked.tenant]
        self._outbox.submits.add(
            handle=asked.number + 1,
            request_id=f"r{asked.number}",
            model=self.model,
            prompt_token_ids=self._prompts.of(asked),
            sampling=types_pb2.SamplingParams(seed=asked.output_tokens),
            stop=types_pb2.StopCriteria(max_tokens=max(asked.output_tokens, self._max_tokens or 0)),
            choice_count=1,
            priority=tenant.priority,
            tenant=tenant.name,
            tenant_weight=tenant.weight,
        )

    def _take(self, message: scheduler_pb2.ServeResponse, now: float) -> None:
        if message.models_changed and message.models:
            self.model = message.models[0].name
        seen = now + self._message_seconds
        measures, requests = self.measures, self.open
        for started in message.started:
            measures.placed(requests[started.handle], started.cached_tokens, started.queue_ms / 1000, now)
        for handle, count in zip(message.handles, message.token_counts, strict=True):
            measures.tokens(requests[handle], count, seen)
        for end in message.ended:
            failure = end.error.reason if end.reason == ERROR else ""
            measures.ended(requests.pop(end.handle), failure, seen)
            self.is_done = measures.ended_count == len(self._load)
            self.on_end()
            if self._load.concurrency is not None:
                self._arrive_now()
