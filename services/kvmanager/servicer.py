"""Translates the kvmanager's RPCs to its core, and tells schedulers when blocks came free by other hands."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from typing import Any

import grpc

from quire.v1 import kvmanager_pb2, kvmanager_pb2_grpc
from services.common.errors import QuireError, Reason, invalid
from services.kvmanager import messages
from services.kvmanager.event_feed import EventFeed, write_batch
from services.kvmanager.executors import ExecutorSpec
from services.kvmanager.holdings import Refused, Session
from services.kvmanager.manager import KvManager
from services.kvmanager.namespaces import namespace_totals
from services.kvmanager.requests import apply_request
from services.kvmanager.responses import Responses
from services.kvmanager.streams import PeerStream

log = logging.getLogger("quire.kvmanager")

NAMESPACES_SHOWN = 20
STANDSTILL_SECONDS = 5.0
"""A sequence that computed nothing for so long may be paused, and an executor that moved nothing may hang: nobody
waits for them any more."""

Context = grpc.aio.ServicerContext[Any, Any]
SchedulerStream = PeerStream[kvmanager_pb2.ReserveRequest, kvmanager_pb2.ReserveResponse]
ExecutorStream = PeerStream[kvmanager_pb2.ReportRequest, kvmanager_pb2.ReportResponse]


class KvManagerServicer(kvmanager_pb2_grpc.KvManagerServiceServicer):
    """Serves one KvManager. All of it runs on one event loop, so the core needs no lock."""

    def __init__(self, manager: KvManager, clock: Callable[[], float] = time.monotonic) -> None:
        self.manager = manager
        self.violation_count = 0  # of the last integrity check
        self._clock = clock
        self._schedulers: dict[str, SchedulerStream] = {}
        self._executors: dict[str, ExecutorStream] = {}
        self._streams: dict[Session, SchedulerStream] = {}
        self._pushes: set[asyncio.Task[None]] = set()
        self._watch: asyncio.TimerHandle | None = None
        self._pin_watch: asyncio.TimerHandle | None = None
        self._feed = EventFeed(manager.events) if manager.events is not None else None

    async def Reserve(  # type: ignore[override]  # writes through the context: answers and pushes share a stream
        self, request_iterator: AsyncIterator[kvmanager_pb2.ReserveRequest], context: Context
    ) -> None:
        requests = aiter(request_iterator)
        first = await anext(requests, None)
        if first is None:
            return
        scheduler_id = messages.read_hello(first)
        stream = SchedulerStream(context)
        _fence(self._schedulers, scheduler_id, stream)
        session = self.manager.open_session(scheduler_id, self._clock())
        self._streams[session] = stream
        log.info("scheduler connected", extra={"scheduler_id": scheduler_id})

        async def handle(request: kvmanager_pb2.ReserveRequest) -> None:
            if request.HasField("hello"):
                raise QuireError(Reason.PROTOCOL, "hello: only the first message carries it")
            self.manager.pass_time(self._clock())
            responses = apply_request(self.manager, session, request)
            if request.all_held_stated:
                self._ask_again()
            self._publish()
            self._push_others(responses, session)
            if responses.to(session).ByteSize():
                await stream.send(lambda: responses.to(session))
            self._watch_waiting()
            self._watch_pins()

        try:
            responses = apply_request(self.manager, session, first)
            self._push_others(responses, session)
            welcome = responses.to(session)
            welcome.lease_ms = round(self.manager.lease_seconds * 1000)
            del welcome.space[:]
            welcome.space.extend(map(messages.write_space, self.manager.executors.values()))
            await stream.send(lambda: welcome)  # before whatever else it is told
            self._reclaim()
            await stream.serve(requests, handle)
        finally:
            if self._schedulers.get(scheduler_id) is stream:
                del self._schedulers[scheduler_id]
            del self._streams[session]
            self.manager.end_session(session, self._clock())
            log.info("scheduler left", extra={"scheduler_id": scheduler_id, "sequences_held": len(session.holdings)})
            asyncio.get_running_loop().call_later(self.manager.lease_seconds + 0.01, self._reclaim)

    async def Report(  # type: ignore[override]  # as Reserve
        self, request_iterator: AsyncIterator[kvmanager_pb2.ReportRequest], context: Context
    ) -> None:
        requests = aiter(request_iterator)
        first = await anext(requests, None)
        if first is None:
            return
        if not first.HasField("description"):
            raise QuireError(Reason.PROTOCOL, "description: the first message must carry it")
        spec = messages.read_description(first.description)
        stream = ExecutorStream(context)
        _fence(self._executors, spec.executor_id, stream)
        self.manager.enter(spec, first.epoch)
        _log_executor("executor connected", spec, first)

        async def handle(request: kvmanager_pb2.ReportRequest) -> None:
            if request.HasField("description"):
                self._replace(spec.executor_id, request)
            elif request.answers:
                self._settle(spec.executor_id, request)
            if self._take_report(spec.executor_id, request):
                await stream.send(self._acknowledgement(spec.executor_id))

        try:
            self._say_due()
            self._take_report(spec.executor_id, first)
            await stream.send(self._acknowledgement(spec.executor_id))
            await stream.serve(requests, handle)
        finally:
            if self._executors.get(spec.executor_id) is stream:
                del self._executors[spec.executor_id]
                self.manager.unregister(spec.executor_id)
                log.info("executor left", extra={"executor_id": spec.executor_id})
                self._reclaim()

    async def GetKvStatus(
        self, request: kvmanager_pb2.GetKvStatusRequest, context: Context
    ) -> kvmanager_pb2.GetKvStatusResponse:
        manager = self.manager
        violations = manager.verify()
        self.violation_count = len(violations)
        for violation in violations:
            log.error("integrity violated", extra={"violation": violation})
        return kvmanager_pb2.GetKvStatusResponse(
            pools=[
                messages.write_pool_status(executor_id, pool)
                for executor_id, executor in manager.executors.items()
                for pool in executor.pools
            ],
            sequence_count=manager.sequence_count,
            prefix_query_tokens=manager.prefix_query_tokens,
            prefix_hit_tokens=manager.prefix_hit_tokens,
            violations=violations,
            evicted_count=manager.evicted_count,
            namespaces=[
                kvmanager_pb2.NamespaceStatus(
                    namespace=total.name,
                    query_tokens=total.query_tokens,
                    hit_tokens=total.hit_tokens,
                    block_count=total.block_count,
                )
                for total in namespace_totals(manager.executors.values())[:NAMESPACES_SHOWN]
            ],
            parked_count=len(manager.waiting),
        )

    async def SubscribeEvents(
        self, request: kvmanager_pb2.SubscribeEventsRequest, context: Context
    ) -> AsyncIterator[kvmanager_pb2.SubscribeEventsResponse]:
        if request.start_sequence_number < 0:
            raise invalid("start_sequence_number", "must not be negative")
        if self._feed is None:
            raise QuireError(Reason.UNSUPPORTED, "this kvmanager keeps no events: its event_history is 0")
        async for batch in self._feed.follow(request.start_sequence_number):
            yield write_batch(batch)

    async def close(self) -> None:
        """Ends all streams, so that peers reconnect elsewhere or later."""
        stopping = QuireError(Reason.DRAINING, "the kvmanager is stopping")
        for scheduler in self._schedulers.values():
            scheduler.close(stopping)
        for executor in self._executors.values():
            executor.close(stopping)
        if self._feed is not None:
            self._feed.close(stopping)

    def _replace(self, executor_id: str, request: kvmanager_pb2.ReportRequest) -> None:
        spec = messages.read_description(request.description)
        if spec.executor_id != executor_id:
            raise QuireError(Reason.PROTOCOL, f"description.executor_id: this stream is that of {executor_id}")
        self.manager.replace(spec, request.epoch)
        _log_executor("executor's blocks replaced", spec, request)

    def _settle(self, executor_id: str, request: kvmanager_pb2.ReportRequest) -> None:
        executor = self.manager.executors[executor_id]
        if request.answers != executor.asked:
            return  # it was asked again since, or twice
        refused = executor.settle(messages.read_inventory(request.inventory))
        found = {"executor_id": executor_id, "inventory": len(request.inventory), "inventory_refused": refused}
        log.info("executor's inventory known", extra=found)
        self._announce([executor_id])

    def _ask_again(self) -> None:
        """Tells executors whose inventory is wanted anew."""
        for executor_id, stream in self._executors.items():
            executor = self.manager.executors.get(executor_id)
            if executor is not None and executor.asked:
                self._start(stream.push(self._acknowledgement(executor_id)))

    def _take_report(self, executor_id: str, request: kvmanager_pb2.ReportRequest) -> bool:
        """Whether the message said anything that is acknowledged."""
        self.manager.pass_time(self._clock())
        try:
            self.manager.report(
                executor_id,
                request.epoch,
                request.closed_epochs,
                request.done_operation_ids,
                request.failed_operation_ids,
            )
        except Refused as problem:
            log.warning("report refused", extra={"executor_id": executor_id, "problem": str(problem)})
        self._reclaim()
        return bool(request.epoch or request.closed_epochs or request.answers or request.HasField("description"))

    def _acknowledgement(self, executor_id: str) -> Callable[[], kvmanager_pb2.ReportResponse]:
        return lambda: kvmanager_pb2.ReportResponse(
            epoch=self.manager.executors[executor_id].epoch,
            first_operation_id=self.manager.first_operation_id,
            ask=self.manager.executors[executor_id].asked,
        )

    def _reclaim(self) -> None:
        gained = self.manager.reclaim(self._clock())
        self._say_due()
        self._publish()
        if gained:
            log.info("blocks reclaimed", extra={"executors": sorted(gained)})
            self._announce(sorted(gained))

    def _publish(self) -> None:
        """Gives followers of events what the core wrote."""
        if self._feed is not None:
            self._feed.publish(time.time_ns() // 1_000_000)

    def _say_due(self) -> None:
        """Tells schedulers what became due by other hands than their own."""
        responses = Responses(self.manager)
        responses.finish()
        self._push_others(responses, None)

    def _watch_pins(self) -> None:
        """Sees to it that schedulers hear of room that appears because a pin ends."""
        end = self.manager.next_pin_end()
        if self._pin_watch is None and end is not None:
            delay = max(0.0, end - self._clock())
            self._pin_watch = asyncio.get_running_loop().call_later(delay + 0.001, self._end_pins)

    def _end_pins(self) -> None:
        self._pin_watch = None
        self.manager.pass_time(self._clock())
        self._announce(list(self.manager.executors))
        self._watch_pins()

    def _watch_waiting(self) -> None:
        """Sees to it that no reservation waits for a sequence or an executor that stands still."""
        if self._watch is None and len(self.manager.waiting):
            self._watch = asyncio.get_running_loop().call_later(STANDSTILL_SECONDS, self._end_waiting)

    def _end_waiting(self) -> None:
        self._watch = None
        responses = Responses(self.manager)
        responses.add_answers(self.manager.answer_stale())
        responses.finish()
        self._push_others(responses, None)
        self._watch_waiting()

    def _push_others(self, responses: Responses, but: Session | None) -> None:
        for session, response in responses:
            stream = self._streams.get(session)
            if stream is not None and session is not but:
                self._start(stream.push(_constant(response)))

    def _announce(self, executor_ids: Iterable[str]) -> None:
        """Tells every scheduler the space of these executors: one that waits for blocks has nothing else to wake it."""

        def make() -> kvmanager_pb2.ReserveResponse | None:
            executors = [self.manager.executors[name] for name in executor_ids if name in self.manager.executors]
            return kvmanager_pb2.ReserveResponse(space=map(messages.write_space, executors)) if executors else None

        for stream in self._schedulers.values():
            self._start(stream.push(make))

    def _start(self, push: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(push)
        self._pushes.add(task)
        task.add_done_callback(self._pushes.discard)


def _constant(response: kvmanager_pb2.ReserveResponse) -> Callable[[], kvmanager_pb2.ReserveResponse]:
    return lambda: response


def _fence(streams: dict[str, PeerStream[Any, Any]], name: str, stream: PeerStream[Any, Any]) -> None:
    older = streams.get(name)
    if older is not None:
        older.close(QuireError(Reason.STALE_EPOCH, f"a newer stream of {name} took over"))
    streams[name] = stream


def _log_executor(event: str, spec: ExecutorSpec, request: kvmanager_pb2.ReportRequest) -> None:
    blocks = sum(pool.block_count for pool in spec.pools)
    log.info(event, extra={"executor_id": spec.executor_id, "blocks": blocks, "epoch": request.epoch})
