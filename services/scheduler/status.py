"""The scheduler's state for people and for other services."""

from __future__ import annotations

import time

import grpc

from quire.v1 import kvmanager_pb2, scheduler_pb2
from services.scheduler.loop import SchedulerLoop

KV_STATUS_SECONDS = 2.0


async def describe(loop: SchedulerLoop) -> scheduler_pb2.GetSchedulerStatusResponse:
    """What runs where. `kv` is absent while the kvmanager does not answer."""
    state, now = loop.state, time.monotonic()
    response = scheduler_pb2.GetSchedulerStatusResponse(
        executors=[
            scheduler_pb2.ExecutorStatus(
                target=executor.target,
                connected=executor.connected,
                description=executor.description,
                epoch=executor.epoch,
                running_count=len(executor.running),
                output_tokens_per_second=executor.output_rate(now),
            )
            for executor in state.executors
        ],
        running_count=state.running_count,
        waiting_count=state.waiting_count,
        preemption_count=sum(executor.counters.preemptions for executor in state.executors),
        gateway_count=len(state.gateways),
    )
    if state.kv_connected:
        try:
            request = kvmanager_pb2.GetKvStatusRequest()
            response.kv.CopyFrom(await loop.kvmanager.stub.GetKvStatus(request, timeout=KV_STATUS_SECONDS))
        except grpc.RpcError:
            response.ClearField("kv")
    return response
