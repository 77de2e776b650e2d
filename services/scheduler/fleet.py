"""Executors that come and go at run time, by an operator's word."""

from __future__ import annotations

import asyncio
import logging

import grpc

from quire.v1 import executor_pb2, executor_pb2_grpc, scheduler_pb2, types_pb2
from services.common.errors import QuireError, Reason, from_rpc_error, invalid
from services.scheduler import epochs
from services.scheduler.loop import SchedulerLoop
from services.scheduler.state import Executor

log = logging.getLogger("quire.scheduler")

ANSWER_SECONDS = 5.0
"""An executor that is to be added says who it is within so long."""
SETTLE_SECONDS = 30.0
"""Its stream is open within so long after that."""


class Fleet:
    """Adds, drains and removes executors, one change at a time."""

    def __init__(self, loop: SchedulerLoop) -> None:
        self._loop = loop
        self._changing = asyncio.Lock()

    async def change(self, request: scheduler_pb2.ManageExecutorRequest) -> None:
        """Does what is asked. NOT_FOUND, ALREADY_EXISTS, EXECUTOR_LOST where none answers at the address."""
        if not request.target:
            raise invalid("target", "must be set")
        async with self._changing:
            if request.action == scheduler_pb2.EXECUTOR_ACTION_ADD:
                await self._add(request.target)
            elif request.action == scheduler_pb2.EXECUTOR_ACTION_DRAIN:
                self._known(request.target).retired = True
            elif request.action == scheduler_pb2.EXECUTOR_ACTION_REMOVE:
                await self._loop.remove_executor(self._known(request.target))
            else:
                raise invalid("action", "must be add, drain or remove")
        self._loop.kick()
        action = scheduler_pb2.ExecutorAction.Name(request.action).removeprefix("EXECUTOR_ACTION_").lower()
        log.info("executors changed", extra={"action": action, "executor": request.target})

    async def _add(self, target: str) -> None:
        """Returns once its stream is open.

        One that cannot be had is not added, for an address is easily mistyped; nor is one that the caller does not wait
        for.
        """
        known = self._find(target)
        if known is not None and not known.retired:
            raise QuireError(Reason.ALREADY_EXISTS, f"target: executor {target} is in use already", field="target")
        if known is not None:
            epochs.executor_used_again(self._loop.state, known)
            return
        await self._check(target)
        executor = self._loop.add_executor(target)
        try:
            if not await self._loop.until(lambda: executor.connected, SETTLE_SECONDS):
                raise QuireError(Reason.EXECUTOR_LOST, f"executor {target} answers, but its stream did not open")
        except BaseException:
            await self._loop.remove_executor(executor)
            raise

    async def _check(self, target: str) -> None:
        """Whether an executor answers there, and none that is in use under another address."""
        description = await self._describe(target)
        for other in self._loop.state.executors:
            if other.connected and other.executor_id == description.executor_id:
                message = f"target: the executor on {target} is in use already, as {other.target}"
                raise QuireError(Reason.ALREADY_EXISTS, message, field="target")

    async def _describe(self, target: str) -> types_pb2.ExecutorDescription:
        async with self._loop.open_channel(target) as channel:
            stub: executor_pb2_grpc.ExecutorServiceAsyncStub = executor_pb2_grpc.ExecutorServiceStub(channel)
            try:
                return (await stub.Describe(executor_pb2.DescribeRequest(), timeout=ANSWER_SECONDS)).description
            except grpc.RpcError as error:
                problem = from_rpc_error(error, Reason.EXECUTOR_LOST).message
                message = f"target: no executor answers on {target}: {problem}"
                raise QuireError(Reason.EXECUTOR_LOST, message, field="target") from error

    def _find(self, target: str) -> Executor | None:
        return next((executor for executor in self._loop.state.executors if executor.target == target), None)

    def _known(self, target: str) -> Executor:
        executor = self._find(target)
        if executor is None:
            known = ", ".join(other.target for other in self._loop.state.executors) or "none"
            raise QuireError(Reason.NOT_FOUND, f"target: no executor {target}; executors: {known}", field="target")
        return executor
