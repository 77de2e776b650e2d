"""A gateway: its real requests and their placing, and around them what its link, its watch and its clients do."""

from __future__ import annotations

import random

from quire.simulation.faults.executor import MODEL
from quire.simulation.faults.invariants import ClientChecks
from quire.simulation.faults.link import Client
from quire.simulation.faults.party import Party
from quire.simulation.faults.scenario import RESUME_SECONDS, Wanted
from quire.simulation.faults.stream import Wires
from quire.simulation.faults.truth import EOS
from quire.v1 import scheduler_pb2, types_pb2
from services.common.errors import QuireError, Reason
from services.gateway.dispatch import Dispatch
from services.gateway.placing.placing import Placing, PlacingRules
from services.gateway.requests import OpenChoice, OpenRequest, RequestTable

HOLD_TOKENS = 6
WATCH_SECONDS = 0.25
KEEP_MS = 1500
"""Every other request outlives its stream, which its gateway opens again, or nobody comes back for it."""


class GatewayParty(Party):
    """One gateway after another. Clients ask it, and lose what they asked for with it."""

    def __init__(self, wires: Wires, index: int, scheduler: Party, checks: ClientChecks) -> None:
        super().__init__(wires.timeline, f"gateway-{index}")
        self._wires, self._scheduler, self._checks = wires, scheduler, checks
        self._arriving: dict[int, Wanted] = {}  # by number: accepted by the system, and not read yet

    def start(self) -> None:
        self._table = RequestTable()
        rules = PlacingRules(resume_seconds=RESUME_SECONDS, slow_seconds=0.0, hold_tokens=HOLD_TOKENS)
        self._placing = Placing(["scheduler"], rules, random.Random(self.life))
        (self._side,) = self._placing.sides
        self._readers: dict[int, _Reader] = {}  # by handle
        self._wanted: dict[int, Wanted] = {}  # by handle
        self._is_watching = self._is_writing = False
        self._link = Client(
            self._wires,
            "Serve",
            self,
            self._scheduler,
            hello=lambda: scheduler_pb2.ServeRequest(gateway_id=f"{self.name}.{self.life}"),
            opened=self._opened,
            received=self._received,
            lost=self._lost,
        )
        self._link.connect()

    def die(self) -> None:
        super().die()
        for wanted in (*self._arriving.values(), *self._wanted.values()):
            self._checks.abandoned(wanted)
        self._arriving.clear()

    def settled(self) -> None:
        if self._link.is_up and self._side.outbox and not self._is_writing:
            self._is_writing = True
            self.after(0.0, self._write)

    # What clients do.

    def arrive(self, wanted: Wanted) -> None:
        """A client's request arrives."""
        if not self.alive:
            self._checks.abandoned(wanted)  # nobody listens
            return
        self._arriving[wanted.number] = wanted
        self.run(self.life, self._ask, wanted)

    def _ask(self, wanted: Wanted) -> None:
        del self._arriving[wanted.number]
        handle = self._table.claim(wanted.tenant, f"r{wanted.number}")
        deadline_at = self.now + wanted.deadline if wanted.deadline is not None else None
        request = OpenRequest(
            _submit(wanted, handle),
            _description(self._side),
            frozenset({EOS}) if wanted.ends else frozenset(),
            self.now,
            deadline_at,
            lambda choice, count, now: None,
        )
        self._wanted[handle] = wanted
        self._table.add(request)
        self._readers[handle] = _Reader(request)
        self._placing.submit(request, self.now)
        if wanted.deadline is not None:
            self.after(wanted.deadline, self._expire, request)
        if wanted.cancel_after is not None:
            self.after(wanted.cancel_after, self._cancel, request)
        if wanted.read_every is not None:
            self.after(wanted.read_every, self._read_slowly, request)
        if not self._is_watching:
            self._is_watching = True
            self.after(WATCH_SECONDS, self._watch)

    def _cancel(self, request: OpenRequest) -> None:
        if self._is_open(request):
            self._checks.cancelled(self._wanted[request.handle])
            self._close(request)

    def _expire(self, request: OpenRequest) -> None:
        if self._is_open(request) and not request.complete:
            self._placing.cancel(request, self.now)
            request.fail(QuireError(Reason.DEADLINE, "the deadline passed"))
            self._advance(request)

    def _read_slowly(self, request: OpenRequest) -> None:
        if not self._is_open(request):
            return
        read_every = self._wanted[request.handle].read_every
        self._read(request)
        if self._is_open(request) and read_every is not None:
            self.after(read_every, self._read_slowly, request)

    # The stream, as SchedulerLink.

    def _opened(self, message: scheduler_pb2.ServeResponse) -> None:
        self._received(message)
        self._placing.connect(self._side, self.now)

    def _received(self, message: scheduler_pb2.ServeResponse) -> None:
        self._side.apply(message, self.now)
        for request in self._table:
            self._advance(request)

    def _lost(self) -> None:
        self._placing.lose(self._side, self.now)
        for request in self._table:
            self._advance(request)

    def _write(self) -> None:
        self._is_writing = False
        if self._link.is_up and self._side.outbox:
            self._link.send(self._side.outbox.take(self.now))

    def _watch(self) -> None:
        self._placing.expire(self.now)
        for request in self._table:
            self._advance(request)
        self._is_watching = bool(self._wanted)
        if self._is_watching:
            self.after(WATCH_SECONDS, self._watch)

    # Readers

    def _advance(self, request: OpenRequest) -> None:
        wanted = self._wanted[request.handle]
        if wanted.read_every is None:
            self._read(request)
        else:
            self._checks.seen(wanted, request)

    def _read(self, request: OpenRequest) -> None:
        """Takes what there is; at the end, or with an error behind all tokens, the request is over."""
        wanted = self._wanted[request.handle]
        self._checks.seen(wanted, request)
        for choice in request.choices:
            self._take(request, choice, wanted.stop_token)
        if all(choice.end is not None for choice in request.choices):
            self._checks.ended(wanted, request)
            self._close(request)
        elif request.error is not None:
            self._checks.failed(wanted, request, request.error)
            self._close(request)
        elif request.held:
            self._placing.hold(request, False)

    def _take(self, request: OpenRequest, choice: OpenChoice, stop_token: int | None) -> None:
        """As a client reads text: what comes behind a stop string is cut off, and the scheduler hears of it."""
        counts = self._readers[request.handle].counts
        first = counts[choice.index]
        ids, _ = choice.since(first)
        counts[choice.index] += len(ids)
        if stop_token is None or stop_token not in ids:
            return
        length = first + ids.index(stop_token)
        choice.cut(length)
        counts[choice.index] = length
        if choice.ended_by_gateway:
            self._placing.stop_at(request, choice.index, length)

    def _is_open(self, request: OpenRequest) -> bool:
        return request.handle in self._wanted

    def _close(self, request: OpenRequest) -> None:
        if request.complete:
            self._placing.forget(request, self.now)
        else:
            self._placing.cancel(request, self.now)
        self._table.remove(request)
        del self._readers[request.handle]
        del self._wanted[request.handle]


class _Reader:
    """How far a client has read, by choice."""

    def __init__(self, request: OpenRequest) -> None:
        self._request, self.counts = request, [0] * len(request.choices)
        request.readers.append(self)

    @property
    def unread(self) -> int:
        return sum(len(choice.output) for choice in self._request.choices) - sum(self.counts)

    def taken(self, choice: int) -> int:
        return self.counts[choice]

    def wake(self) -> None:
        """It looks whenever something arrives."""


def _submit(wanted: Wanted, handle: int) -> scheduler_pb2.Submit:
    return scheduler_pb2.Submit(
        handle=handle,
        request_id=f"r{wanted.number}",
        model=MODEL,
        prompt_token_ids=wanted.prompt,
        sampling=types_pb2.SamplingParams(seed=wanted.seed),
        stop=types_pb2.StopCriteria(
            max_tokens=wanted.max_tokens, ignore_eos=not wanted.ends, stop=["x"] if wanted.stop_token else []
        ),
        choice_count=wanted.choices,
        priority=wanted.priority,
        tenant=wanted.tenant,
        tenant_weight=wanted.weight,
        keep_ms=KEEP_MS if wanted.number % 2 else 0,
        target_first_token_ms=round(1000 * wanted.first_token) if wanted.first_token is not None else 0,
    )


def _description(dispatch: Dispatch) -> types_pb2.ModelDescription:
    """The model as the gateway knows it, or as it will know it once a scheduler has answered."""
    known = dispatch.models.get(MODEL)
    return known or types_pb2.ModelDescription(
        name=MODEL, fingerprint="weights", tokenizer_fingerprint="tokenizer", eos_token_ids=[EOS]
    )
