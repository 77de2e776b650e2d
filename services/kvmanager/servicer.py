"""Translates the kvmanager's RPCs to its core, and tells schedulers when blocks came free by other hands."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import grpc

from quire.v1 import kvmanager_pb2, kvmanager_pb2_grpc
from services.common.errors import QuireError, Reason
from services.kvmanager import messages
from services.kvmanager.executors import ExecutorSpec
from services.kvmanager.holdings import Refused
from services.kvmanager.manager import KvManager
from services.kvmanager.requests import apply_request
from services.kvmanager.streams import PeerStream

log = logging.getLogger("quire.kvmanager")

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
        self._pushes: set[asyncio.Task[None]] = set()

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
        log.info("scheduler connected", extra={"scheduler_id": scheduler_id})
        self._reclaim()

        async def handle(request: kvmanager_pb2.ReserveRequest) -> None:
            if request.HasField("hello"):
                raise QuireError(Reason.PROTOCOL, "hello: only the first message carries it")
            response = apply_request(self.manager, session, request)
            if response is not None:
                await stream.send(lambda: response)

        try:
            welcome = apply_request(self.manager, session, first) or kvmanager_pb2.ReserveResponse()
            welcome.lease_ms = round(self.manager.lease_seconds * 1000)
            del welcome.space[:]
            welcome.space.extend(map(messages.write_space, self.manager.executors.values()))
            await stream.send(lambda: welcome)
            await stream.serve(requests, handle)
        finally:
            if self._schedulers.get(scheduler_id) is stream:
                del self._schedulers[scheduler_id]
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
        _, refused = self.manager.register(spec, messages.read_inventory(first.inventory), first.epoch)
        _log_registration("executor connected", spec, first, refused)

        async def handle(request: kvmanager_pb2.ReportRequest) -> None:
            if request.HasField("description"):
                self._replace(spec.executor_id, request)
            if self._take_report(spec.executor_id, request):
                await stream.send(self._acknowledgement(spec.executor_id))

        try:
            self._announce([spec.executor_id])
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
        )

    async def SubscribeEvents(  # type: ignore[override]  # refuses before it streams
        self, request: kvmanager_pb2.SubscribeEventsRequest, context: Context
    ) -> None:
        raise QuireError(Reason.UNSUPPORTED, "events are not supported")

    async def close(self) -> None:
        """Ends all streams, so that peers reconnect elsewhere or later."""
        stopping = QuireError(Reason.DRAINING, "the kvmanager is stopping")
        for scheduler in self._schedulers.values():
            scheduler.close(stopping)
        for executor in self._executors.values():
            executor.close(stopping)

    def _replace(self, executor_id: str, request: kvmanager_pb2.ReportRequest) -> None:
        spec = messages.read_description(request.description)
        if spec.executor_id != executor_id:
            raise QuireError(Reason.PROTOCOL, f"description.executor_id: this stream is that of {executor_id}")
        _, refused = self.manager.replace(spec, messages.read_inventory(request.inventory), request.epoch)
        _log_registration("executor's blocks replaced", spec, request, refused)
        self._announce([executor_id])

    def _take_report(self, executor_id: str, request: kvmanager_pb2.ReportRequest) -> bool:
        """Whether the message said anything that is acknowledged."""
        if request.done_operation_ids:
            log.warning("unknown operations reported done", extra={"executor_id": executor_id})
        try:
            self.manager.report(executor_id, request.epoch, request.closed_epochs)
        except Refused as problem:
            log.warning("report refused", extra={"executor_id": executor_id, "problem": str(problem)})
        self._reclaim()
        return bool(request.epoch or request.closed_epochs or request.HasField("description"))

    def _acknowledgement(self, executor_id: str) -> Callable[[], kvmanager_pb2.ReportResponse]:
        return lambda: kvmanager_pb2.ReportResponse(epoch=self.manager.executors[executor_id].epoch)

    def _reclaim(self) -> None:
        gained = self.manager.reclaim(self._clock())
        if gained:
            log.info("blocks reclaimed", extra={"executors": sorted(gained)})
            self._announce(sorted(gained))

    def _announce(self, executor_ids: Iterable[str]) -> None:
        """Tells every scheduler the space of these executors: one that waits for blocks has nothing else to wake it."""

        def make() -> kvmanager_pb2.ReserveResponse | None:
            executors = [self.manager.executors[name] for name in executor_ids if name in self.manager.executors]
            return kvmanager_pb2.ReserveResponse(space=map(messages.write_space, executors)) if executors else None

        for stream in self._schedulers.values():
            task = asyncio.create_task(stream.push(make))
            self._pushes.add(task)
            task.add_done_callback(self._pushes.discard)


def _fence(streams: dict[str, PeerStream[Any, Any]], name: str, stream: PeerStream[Any, Any]) -> None:
    older = streams.get(name)
    if older is not None:
        older.close(QuireError(Reason.STALE_EPOCH, f"a newer stream of {name} took over"))
    streams[name] = stream


def _log_registration(event: str, spec: ExecutorSpec, request: kvmanager_pb2.ReportRequest, refused: int) -> None:
    log.info(
        event,
        extra={
            "executor_id": spec.executor_id,
            "blocks": sum(pool.block_count for pool in spec.pools),
            "epoch": request.epoch,
            "inventory": len(request.inventory),
            "inventory_refused": refused,
        },
    )
