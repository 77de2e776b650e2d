"""The scheduler's real core between its streams' messages, in virtual time: what the loop does, without sockets."""

from __future__ import annotations

import functools
from collections.abc import Callable

from quire.simulation.service import Service
from quire.simulation.timeline import Timeline
from quire.v1 import executor_pb2, kvmanager_pb2, scheduler_pb2
from services.scheduler import epochs
from services.scheduler.alarms import next_alarm
from services.scheduler.apply import apply
from services.scheduler.requests import open_gateway, serve
from services.scheduler.reserve import take
from services.scheduler.state import Executor, Gateway, State
from services.scheduler.turn import turn


class SimulatedScheduler(Service):
    """One scheduler, and the sending ends of its streams."""

    def __init__(
        self, timeline: Timeline, state: State, message_seconds: float, stolen: Callable[[float], None]
    ) -> None:
        super().__init__(timeline, message_seconds, stolen)
        self.state = state
        self.send_reserve: Callable[[kvmanager_pb2.ReserveRequest, float], None] = lambda message, delay: None
        self.send_plan: list[Callable[[executor_pb2.StepPlan, float], None]] = []  # by executor
        self.send_gateway: dict[Gateway, Callable[[scheduler_pb2.ServeResponse, float], None]] = {}
        self._alarm_at = float("inf")

    # Streams: what is to be called when a message of a peer arrives.

    def open_gateway(
        self, gateway_id: str, send: Callable[[scheduler_pb2.ServeResponse, float], None]
    ) -> Callable[[scheduler_pb2.ServeRequest], None]:
        gateway = open_gateway(self.state, gateway_id, self.timeline.now)
        self.send_gateway[gateway] = send
        self.wake()
        return functools.partial(self.post, functools.partial(self._serve, gateway))

    def open_kvmanager(
        self, send: Callable[[kvmanager_pb2.ReserveRequest, float], None]
    ) -> Callable[[kvmanager_pb2.ReserveResponse], None]:
        self.send_reserve = send
        epochs.kvmanager_opened(self.state)
        self.wake()
        return functools.partial(self.post, self._take)

    def open_executor(
        self, index: int, welcome: executor_pb2.RunWelcome, send: Callable[[executor_pb2.StepPlan, float], None]
    ) -> Callable[[executor_pb2.StepResults], None]:
        executor = self.state.executors[index]
        self.send_plan[index:] = [send, *self.send_plan[index + 1 :]]
        epochs.executor_opened(self.state, executor, welcome.epoch, welcome.description, self.timeline.now)
        self.wake()
        return functools.partial(self.post, functools.partial(self._apply, executor))

    # Messages

    def _serve(self, gateway: Gateway, message: scheduler_pb2.ServeRequest, now: float) -> None:
        serve(self.state, gateway, message, now)

    def _take(self, message: kvmanager_pb2.ReserveResponse, now: float) -> None:
        take(self.state, message, now)

    def _apply(self, executor: Executor, results: executor_pb2.StepResults, now: float) -> None:
        apply(self.state, executor, results, now)

    def act(self, now: float, spent: float) -> None:
        """One turn, and what it decided to send."""
        outgoing = turn(self.state, now)
        for executor, plan in outgoing.plans:
            self.send_plan[executor.index](plan, spent)
        for message in outgoing.reservations:
            self.send_reserve(message, spent)
        for gateway in self.state.gateways:
            if gateway.has_output:
                self.send_gateway[gateway](gateway.take_output(), spent)
        at = next_alarm(self.state)
        if at is not None and at < self._alarm_at:
            self._alarm_at = at
            self.timeline.at(at, self._ring, at)

    def _ring(self, at: float) -> None:
        if at == self._alarm_at:
            self._alarm_at = float("inf")
            self.wake()
