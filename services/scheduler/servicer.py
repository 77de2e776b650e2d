"""SchedulerService: translates calls to the loop and its answers back."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc

from quire.v1 import kvmanager_pb2, scheduler_pb2, scheduler_pb2_grpc, scheduler_status_pb2
from services.common.errors import Reason, from_rpc_error
from services.scheduler import status
from services.scheduler.fleet import Fleet
from services.scheduler.loop import SchedulerLoop
from services.scheduler.models import ModelManager

Context = grpc.aio.ServicerContext[Any, Any]


class SchedulerServicer(scheduler_pb2_grpc.SchedulerServiceServicer):
    def __init__(self, loop: SchedulerLoop) -> None:
        self._loop = loop
        self._models = ModelManager(loop)
        self._fleet = Fleet(loop)

    async def Serve(  # type: ignore[override]  # writes through the context: a cancelled call ends here and now
        self, request_iterator: AsyncIterator[scheduler_pb2.ServeRequest], context: Context
    ) -> None:
        await self._loop.gateways.serve(aiter(request_iterator), context.write)

    async def GetTokenizer(
        self, request: scheduler_pb2.GetTokenizerRequest, context: Context
    ) -> AsyncIterator[scheduler_pb2.GetTokenizerResponse]:
        async for data in self._models.fetch_tokenizer(request.tokenizer_fingerprint):
            yield scheduler_pb2.GetTokenizerResponse(data=data)

    async def FollowKvEvents(
        self, request: scheduler_pb2.FollowKvEventsRequest, context: Context
    ) -> AsyncIterator[scheduler_pb2.FollowKvEventsResponse]:
        wanted = kvmanager_pb2.SubscribeEventsRequest(start_sequence_number=request.start_sequence_number)
        try:
            async for events in self._loop.kvmanager.stub.SubscribeEvents(wanted):
                yield scheduler_pb2.FollowKvEventsResponse(events=events)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, Reason.KVMANAGER_LOST) from error

    async def GetSchedulerStatus(
        self, request: scheduler_status_pb2.GetSchedulerStatusRequest, context: Context
    ) -> scheduler_status_pb2.GetSchedulerStatusResponse:
        return await status.describe(self._loop)

    async def ManageModel(
        self, request: scheduler_pb2.ManageModelRequest, context: Context
    ) -> scheduler_pb2.ManageModelResponse:
        return scheduler_pb2.ManageModelResponse(models=await self._models.change(request))

    async def ManageExecutor(
        self, request: scheduler_pb2.ManageExecutorRequest, context: Context
    ) -> scheduler_pb2.ManageExecutorResponse:
        await self._fleet.change(request)
        return scheduler_pb2.ManageExecutorResponse(executors=status.executors(self._loop))
