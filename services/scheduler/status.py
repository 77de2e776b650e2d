"""The scheduler's state for people and for other services."""

from __future__ import annotations

import time

import grpc

from quire.v1 import kvmanager_pb2, scheduler_status_pb2
from services.scheduler.loop import SchedulerLoop
from services.scheduler.queue_status import describe_decisions, describe_queues, describe_refusals
from services.scheduler.speculation.status import describe_drafts

KV_STATUS_SECONDS = 2.0


async def describe(loop: SchedulerLoop) -> scheduler_status_pb2.GetSchedulerStatusResponse:
    """What runs where. `kv` is absent while the kvmanager does not answer."""
    state = loop.state
    now = time.monotonic()
    response = scheduler_status_pb2.GetSchedulerStatusResponse(
        executors=executors(loop),
        running_count=state.running_count,
        waiting_count=state.waiting_count,
        preemption_count=sum(counters.preemptions for counters in state.totals.values()),
        gateway_count=len(state.gateways),
        queues=describe_queues(state, now),
        refusals=describe_refusals(state),
        decisions=describe_decisions(state, now),
    )
    if state.kv_connected:
        try:
            request = kvmanager_pb2.GetKvStatusRequest()
            response.kv.CopyFrom(await loop.kvmanager.stub.GetKvStatus(request, timeout=KV_STATUS_SECONDS))
        except grpc.RpcError:
            response.ClearField("kv")
    return response


def executors(loop: SchedulerLoop) -> list[scheduler_status_pb2.ExecutorStatus]:
    """All that are in use, in the order in which they came."""
    now = time.monotonic()
    return [
        scheduler_status_pb2.ExecutorStatus(
            target=executor.target,
            connected=executor.connected,
            description=executor.description,
            epoch=executor.epoch,
            running_count=len(executor.running),
            output_tokens_per_second=executor.output_rate(now),
            number=executor.index,
            draining=executor.draining,
            slowness=executor.slowness.factor,
            slowness_reason=executor.slowness.reason,
            speculation=describe_drafts(loop.state, executor),
        )
        for executor in loop.state.executors
    ]
