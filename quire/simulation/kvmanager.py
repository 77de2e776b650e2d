"""The kvmanager's real core behind its streams' messages, in virtual time."""

from __future__ import annotations

from collections.abc import Callable

from quire.simulation.service import Service
from quire.simulation.timeline import Timeline
from quire.v1 import kvmanager_pb2
from services.kvmanager import messages
from services.kvmanager.manager import KvManager
from services.kvmanager.requests import apply_request
from services.kvmanager.responses import Responses
from services.kvmanager.servicer import STANDSTILL_SECONDS

LEASE_SECONDS = 10.0


class SimulatedKvManager:
    """What the servicer does around the core, for one scheduler."""

    def __init__(
        self, timeline: Timeline, manager: KvManager, message_seconds: float, stolen: Callable[[float], None]
    ) -> None:
        self.manager = manager
        self.service = Service(timeline, message_seconds, stolen)
        self.send: Callable[[kvmanager_pb2.ReserveResponse, float], None] = lambda response, delay: None
        self._timeline = timeline
        self._message_seconds = message_seconds
        self._session = self.manager.open_session("scheduler", timeline.now)
        self._is_watching = False

    def reserve(self, request: kvmanager_pb2.ReserveRequest) -> None:
        """A scheduler's message arrives."""
        self.service.post(self._reserve, request)

    def report(self, request: kvmanager_pb2.ReportRequest) -> None:
        """An executor's message arrives."""
        self.service.post(self._report, request)

    def _reserve(self, request: kvmanager_pb2.ReserveRequest, now: float) -> None:
        self.manager.pass_time(now)
        self._answer(apply_request(self.manager, self._session, request))
        if len(self.manager.waiting) and not self._is_watching:
            self._is_watching = True
            self._timeline.at(now + STANDSTILL_SECONDS, self._end_waiting)

    def _report(self, request: kvmanager_pb2.ReportRequest, now: float) -> None:
        spec = messages.read_description(request.description)
        self.manager.register(spec, messages.read_inventory(request.inventory), request.epoch)
        self.manager.report(spec.executor_id, request.epoch, request.closed_epochs, request.done_operation_ids)
        self.manager.reclaim(now)
        responses = Responses(self.manager)
        responses.touched(self._session)[spec.executor_id] = None
        responses.finish()
        self._answer(responses)

    def _end_waiting(self) -> None:
        """Nobody waits for longer for a sequence that stands still."""
        self._is_watching = False
        responses = Responses(self.manager)
        responses.add_answers(self.manager.answer_stale())
        responses.finish()
        self._answer(responses)

    def _answer(self, responses: Responses) -> None:
        for session, response in responses:
            if session is self._session:
                self.send(response, self._message_seconds)
