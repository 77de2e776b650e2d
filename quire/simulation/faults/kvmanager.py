"""The kvmanager: its real core, and around it what its servicer does."""

from __future__ import annotations

from quire.simulation.faults.invariants import KvChecks, Violation
from quire.simulation.faults.party import Party
from quire.simulation.faults.scenario import LEASE_SECONDS
from quire.simulation.faults.stream import SERVER, End, Stream, Wires
from quire.v1 import kvmanager_pb2
from services.common.errors import QuireError, Reason
from services.kvmanager import messages
from services.kvmanager.holdings import Refused, Session
from services.kvmanager.manager import KvManager
from services.kvmanager.requests import apply_request
from services.kvmanager.responses import Responses
from services.kvmanager.servicer import STANDSTILL_SECONDS

OPERATIONS = 1_000_000
"""Operation ids of one process, at most."""


class SchedulerEnd:
    """The kvmanager's end of one Reserve stream."""

    def __init__(self, party: KvManagerParty, stream: Stream) -> None:
        self.stream = stream
        self.session: Session | None = None
        self._party = party
        self._id = ""

    def received(self, stream: Stream, message: kvmanager_pb2.ReserveRequest) -> None:
        party = self._party
        if self.session is None:
            self._begin(messages.read_hello(message), message)
            return
        party.manager.pass_time(party.now)
        responses = apply_request(party.manager, self.session, message)
        if message.all_held_stated:
            party.ask_again()
        party.push(responses)
        party.watch_waiting()

    def closed(self, stream: Stream, error: QuireError) -> None:
        self.end()

    def end(self) -> None:
        party = self._party
        if self.session is None:
            return
        if party.schedulers.get(self._id) is self:
            del party.schedulers[self._id]
        session, self.session = self.session, None
        del party.streams[session]
        party.manager.end_session(session, party.now)
        party.after(LEASE_SECONDS + 0.01, party.reclaim)

    def _begin(self, scheduler_id: str, first: kvmanager_pb2.ReserveRequest) -> None:
        party = self._party
        self._id = scheduler_id
        older = party.schedulers.get(scheduler_id)
        if older is not None:
            older.stream.close(SERVER, QuireError(Reason.STALE_EPOCH, "a newer stream took over"))
            party.after(0.0, older.end)
        party.schedulers[scheduler_id] = self
        self.session = party.manager.open_session(scheduler_id, party.now)
        party.streams[self.session] = self.stream
        responses = apply_request(party.manager, self.session, first)
        welcome = responses.to(self.session)
        welcome.lease_ms = round(LEASE_SECONDS * 1000)
        del welcome.space[:]
        welcome.space.extend(map(messages.write_space, party.manager.executors.values()))
        self.stream.send(SERVER, welcome)
        party.push(responses, but=self.session)
        party.reclaim()


class ExecutorEnd:
    """The kvmanager's end of one Report stream."""

    def __init__(self, party: KvManagerParty, stream: Stream) -> None:
        self.stream = stream
        self._party = party
        self._id = ""

    def received(self, stream: Stream, message: kvmanager_pb2.ReportRequest) -> None:
        party = self._party
        if not self._id:
            self._begin(message)
        manager = party.manager
        if message.answers and message.answers == manager.executors[self._id].asked:
            manager.executors[self._id].settle(messages.read_inventory(message.inventory))
            party.announce([self._id])
        manager.pass_time(party.now)
        try:
            manager.report(
                self._id,
                message.epoch,
                message.closed_epochs,
                message.done_operation_ids,
                message.failed_operation_ids,
            )
        except Refused as problem:
            raise Violation(f"the kvmanager refuses an executor's report: {problem}") from problem
        party.reclaim()
        if message.epoch or message.closed_epochs or message.answers or message.HasField("description"):
            self.acknowledge()

    def acknowledge(self) -> None:
        manager = self._party.manager
        executor = manager.executors[self._id]
        answer = kvmanager_pb2.ReportResponse(
            epoch=executor.epoch, first_operation_id=manager.first_operation_id, ask=executor.asked
        )
        self.stream.send(SERVER, answer)

    def closed(self, stream: Stream, error: QuireError) -> None:
        self.end()

    def end(self) -> None:
        party = self._party
        if self._id and party.executors.get(self._id) is self:
            del party.executors[self._id]
            party.manager.unregister(self._id)
            party.reclaim()

    def _begin(self, first: kvmanager_pb2.ReportRequest) -> None:
        party = self._party
        spec = messages.read_description(first.description)
        self._id = spec.executor_id
        older = party.executors.get(self._id)
        if older is not None:
            older.stream.close(SERVER, QuireError(Reason.STALE_EPOCH, "a newer stream took over"))
        party.executors[self._id] = self
        party.manager.enter(spec, first.epoch)
        party.say_due()


class KvManagerParty(Party):
    """One kvmanager after another."""

    manager: KvManager

    def __init__(self, wires: Wires, checks: KvChecks) -> None:
        super().__init__(wires.timeline, "kvmanager")
        self._checks = checks

    def start(self) -> None:
        self.manager = KvManager(LEASE_SECONDS, self.life * OPERATIONS + 1)
        self.schedulers: dict[str, SchedulerEnd] = {}
        self.executors: dict[str, ExecutorEnd] = {}
        self.streams: dict[Session, Stream] = {}
        self._watches = False

    def accept(self, kind: str, stream: Stream) -> End:
        return SchedulerEnd(self, stream) if kind == "Reserve" else ExecutorEnd(self, stream)

    def ask_again(self) -> None:
        for executor_id, end in self.executors.items():
            if self.manager.executors[executor_id].asked:
                end.acknowledge()

    def settled(self) -> None:
        self._checks.after_event(self.manager)

    def push(self, responses: Responses, but: Session | None = None) -> None:
        for session, response in responses:
            stream = self.streams.get(session)
            if stream is not None and session is not but:
                stream.send(SERVER, response)

    def reclaim(self) -> None:
        gained = self.manager.reclaim(self.now)
        self.say_due()
        if gained:
            self.announce(sorted(gained))

    def say_due(self) -> None:
        responses = Responses(self.manager)
        responses.finish()
        self.push(responses)

    def announce(self, executor_ids: list[str]) -> None:
        executors = [self.manager.executors[name] for name in executor_ids if name in self.manager.executors]
        if executors:
            for end in self.schedulers.values():
                end.stream.send(SERVER, kvmanager_pb2.ReserveResponse(space=map(messages.write_space, executors)))

    def watch_waiting(self) -> None:
        if not self._watches and len(self.manager.waiting):
            self._watches = True
            self.after(STANDSTILL_SECONDS, self._end_waiting)

    def _end_waiting(self) -> None:
        self._watches = False
        responses = Responses(self.manager)
        responses.add_answers(self.manager.answer_stale())
        responses.finish()
        self.push(responses)
        self.watch_waiting()
