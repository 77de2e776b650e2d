"""The scheduler: its real core, and around it what its loop and its links do."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from quire.simulation.faults.invariants import SchedulerChecks, Violation
from quire.simulation.faults.link import Client
from quire.simulation.faults.party import Party
from quire.simulation.faults.stream import SERVER, End, Stream, Wires
from quire.v1 import executor_pb2, kvmanager_pb2, scheduler_pb2
from services.common.errors import QuireError, Reason
from services.scheduler import epochs, orphans, requests
from services.scheduler.alarms import next_alarm
from services.scheduler.apply import apply
from services.scheduler.reserve import take
from services.scheduler.restate import restate
from services.scheduler.state import Executor, Gateway, Limits, State
from services.scheduler.turn import turn

DRAIN_POLL_SECONDS = 0.01
TURN_SECONDS = 0.0001
"""Several events within this time make one turn."""


class GatewayEnd:
    """The scheduler's end of one Serve stream."""

    def __init__(self, scheduler: SchedulerParty, stream: Stream) -> None:
        self.stream = stream
        self.gateway: Gateway | None = None
        self._scheduler = scheduler

    def received(self, stream: Stream, message: scheduler_pb2.ServeRequest) -> None:
        scheduler = self._scheduler
        if self.gateway is None:
            self.gateway = requests.open_gateway(scheduler.state, message.gateway_id, scheduler.now)
        if self.gateway.open:
            requests.serve(scheduler.state, self.gateway, message, scheduler.now)
        scheduler.kick()

    def closed(self, stream: Stream, error: QuireError) -> None:
        if self.gateway is not None:
            requests.close_gateway(self._scheduler.state, self.gateway, self._scheduler.now)
            self._scheduler.kick()


class SchedulerParty(Party):
    """One scheduler after another. `executors` and `kvmanager` are the parties that it connects to."""

    state: State

    def __init__(
        self, wires: Wires, kvmanager: Party, executors: list[Party], limits: Limits, checks: SchedulerChecks
    ) -> None:
        super().__init__(wires.timeline, "scheduler")
        self._wires, self._kvmanager_party, self._executor_parties = wires, kvmanager, executors
        self._limits, self._checks = limits, checks

    def start(self) -> None:
        self.state = State(tuple(party.name for party in self._executor_parties), self._limits)
        self._ends: list[GatewayEnd] = []
        self._is_kicked = False
        self._alarm_at: float | None = None
        self._kv_opened_before = False
        self._kvmanager = Client(
            self._wires,
            "Reserve",
            self,
            self._kvmanager_party,
            hello=lambda: kvmanager_pb2.ReserveRequest(
                hello=kvmanager_pb2.ReserveHello(scheduler_id=f"scheduler-{self.life}")
            ),
            opened=self._kv_opened,
            received=self._kv_received,
            lost=self._kv_lost,
        )
        self._executors = [
            Client(
                self._wires,
                "Run",
                self,
                party,
                hello=lambda: executor_pb2.RunRequest(hello=executor_pb2.RunHello(scheduler_id="scheduler")),
                opened=functools.partial(self._opened, executor),
                received=functools.partial(self._received, executor),
                lost=functools.partial(self._lost, executor),
            )
            for party, executor in zip(self._executor_parties, self.state.executors, strict=True)
        ]
        for client in (self._kvmanager, *self._executors):
            client.connect()

    def accept(self, kind: str, stream: Stream) -> End:
        end = GatewayEnd(self, stream)
        self._ends.append(end)
        return end

    def kick(self) -> None:
        if not self._is_kicked:
            self._is_kicked = True
            self.after(self._wires.rng.choice([0.0, TURN_SECONDS]), self._turn)

    def drain(self, seconds: float, then: Callable[[], None]) -> None:
        """Refuses new requests; ends once the running ones have ended, or after so many seconds."""
        self.state.draining = True
        orphans.end_all(self.state)
        self.kick()
        self._await_rest(self.now + seconds, then)

    def _await_rest(self, end: float, then: Callable[[], None]) -> None:
        state = self.state
        if self.now >= end or not (state.request_ids or any(gateway.has_output for gateway in state.gateways)):
            then()
        else:
            self.after(DRAIN_POLL_SECONDS, self._await_rest, end, then)

    # The kvmanager's stream, as KvLink.

    def _kv_opened(self, first: kvmanager_pb2.ReserveResponse) -> None:
        if self._kv_opened_before:
            for message in restate(self.state):
                self._kvmanager.send(message)
        self._kv_opened_before = True
        epochs.kvmanager_opened(self.state)
        self._kv_received(first)

    def _kv_received(self, message: kvmanager_pb2.ReserveResponse) -> None:
        self._guarded(take, self.state, message, self.now)
        self.kick()

    def _kv_lost(self) -> None:
        epochs.kvmanager_lost(self.state, self.now)
        self.kick()

    # The executors' streams, as ExecutorLink.

    def _opened(self, executor: Executor, first: executor_pb2.RunResponse) -> None:
        welcome = first.welcome
        epochs.executor_opened(self.state, executor, welcome.epoch, welcome.description, self.now)
        self.kick()

    def _received(self, executor: Executor, message: executor_pb2.RunResponse) -> None:
        if message.HasField("drain"):
            epochs.executor_ending(executor, message.drain.remaining_seconds, self.now)
        else:
            self._guarded(apply, self.state, executor, message.results, self.now)
        self.kick()

    def _lost(self, executor: Executor) -> None:
        if executor.connected:
            epochs.executor_lost(self.state, executor, self.now)
            self.kick()

    def _guarded(self, action: Any, *args: Any) -> None:
        try:
            action(*args)
        except QuireError as error:
            raise Violation(f"the scheduler calls a sound peer's message wrong: {error.message}") from error

    def _turn(self) -> None:
        self._is_kicked = False
        state = self.state
        outgoing = turn(state, self.now)
        self._checks.after_turn(state, outgoing, self.now)
        for executor, plan in outgoing.plans:
            self._executors[executor.index].send(executor_pb2.RunRequest(plan=plan))
        for message in outgoing.reservations:
            self._kvmanager.send(message)
        for executor, client in zip(state.executors, self._executors, strict=True):
            if executor.stream_failure:
                client.drop(QuireError(Reason.EXECUTOR_LOST, executor.stream_failure))
        self._write()
        at = next_alarm(state)
        if at is not None and at != self._alarm_at:
            self._alarm_at = at
            self.after(at - self.now, self._alarm, at)

    def _write(self) -> None:
        for end in self._ends:
            gateway = end.gateway
            if gateway is None:
                continue
            if not gateway.open:
                end.stream.close(SERVER, QuireError(Reason.PRECONDITION, "a newer stream of this gateway took over"))
            elif gateway.has_output:
                end.stream.send(SERVER, gateway.take_output())
        self._ends = [end for end in self._ends if end.stream.is_open(SERVER)]

    def _alarm(self, at: float) -> None:
        if at == self._alarm_at:
            self._alarm_at = None
            self.kick()
