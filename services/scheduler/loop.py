"""The loop around the core: events kick it, it takes a turn, and hands out what the turn decided. Idle, it sleeps."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable

import grpc

from services.common.rpc import channel
from services.common.speculation import parse_speculation
from services.scheduler import epochs
from services.scheduler.alarms import next_alarm
from services.scheduler.aliases import parse_aliases
from services.scheduler.executors import ExecutorLink
from services.scheduler.gateways import GatewayStreams
from services.scheduler.kv_link import KvLink
from services.scheduler.orphans import end_all
from services.scheduler.policy import make_policy
from services.scheduler.settings import SchedulerSettings
from services.scheduler.state import Executor, Limits, State
from services.scheduler.turn import turn


class SchedulerLoop:
    """Owns the state and the streams. All of it runs on one event loop, so the core needs no lock."""

    def __init__(self, settings: SchedulerSettings, on_ready: Callable[[bool], Awaitable[None]]) -> None:
        """`on_ready` is told whenever readiness changes."""
        self.state = State(settings.executors, limits(settings), aliases=parse_aliases(settings.aliases))
        self._on_ready = on_ready
        self._settings = settings
        self._scheduler_id = f"scheduler-{uuid.uuid4().hex[:12]}"
        self._kv_channel = channel(settings.kvmanager, settings)
        self.kvmanager = KvLink(self.state, settings.kvmanager, self._kv_channel, self._scheduler_id, self.kick)
        self.executors = {executor.index: self._link(executor) for executor in self.state.executors}
        self.gateways = GatewayStreams(self.state, self.kick)
        self._kicked = asyncio.Event()
        self._ready = False
        self._ready_changed = asyncio.Event()
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_at: float | None = None
        self._waiting: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []
        self._group: asyncio.TaskGroup | None = None  # what keeps the streams, while it runs

    def kick(self) -> None:
        """Something happened: take a turn soon. Several kicks make one turn."""
        self._kicked.set()

    async def run(self) -> None:
        """Runs until cancelled. Raises whatever breaks the core: nothing may go on behind its back."""
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                group.create_task(self.kvmanager.run())
                for link in self.executors.values():
                    link.start(group)
                group.create_task(self._tell_readiness())
                while True:
                    await self._kicked.wait()
                    self._kicked.clear()
                    self._turn()
        finally:
            if self._alarm is not None:
                self._alarm.cancel()
            for link in self.executors.values():
                await link.stop()
            await self._kv_channel.close()

    def open_channel(self, target: str) -> grpc.aio.Channel:
        """To another executor, with this service's credentials."""
        return channel(target, self._settings)

    def add_executor(self, target: str) -> Executor:
        """Connects one more executor. While the loop runs."""
        assert self._group is not None
        executor = epochs.executor_added(self.state, target)
        link = self.executors[executor.index] = self._link(executor)
        link.start(self._group)
        return executor

    async def remove_executor(self, executor: Executor) -> None:
        """Ends an executor's stream for good; what runs there goes on elsewhere.

        A cancellation gets through once that is done: an executor without a stream could be in use for ever.
        """
        removing = asyncio.create_task(self._remove(executor))
        try:
            await asyncio.shield(removing)
        except asyncio.CancelledError:
            await asyncio.wait({removing})
            raise

    async def _remove(self, executor: Executor) -> None:
        await self.executors.pop(executor.index).stop()  # before the state forgets it: nothing comes from it after that
        epochs.executor_removed(self.state, executor, time.monotonic())
        self.kick()

    def _link(self, executor: Executor) -> ExecutorLink:
        return ExecutorLink(self.state, executor, self.open_channel(executor.target), self._scheduler_id, self.kick)

    async def until(self, holds: Callable[[], bool], seconds: float | None) -> bool:
        """Waits until a condition on the state holds; False where it does not within that time."""
        if holds():
            return True
        entry = (holds, asyncio.get_running_loop().create_future())
        self._waiting.append(entry)
        try:
            await asyncio.wait_for(entry[1], seconds)
            return True
        except TimeoutError:
            return False
        finally:
            if entry in self._waiting:
                self._waiting.remove(entry)

    async def drain(self) -> None:
        """Refuses new requests and returns when the running ones have ended and their ends were sent."""
        state = self.state
        state.draining = True
        end_all(state)
        self.kick()
        await self.until(
            lambda: not state.request_ids and not any(gateway.has_output for gateway in state.gateways), None
        )
        self.gateways.end()

    def _turn(self) -> None:
        outgoing = turn(self.state, time.monotonic())
        for executor, plan in outgoing.plans:
            if (link := self.executors.get(executor.index)) is not None:  # else it is being removed
                link.send(plan)
        for message in outgoing.reservations:
            self.kvmanager.send(message)
        for link in self.executors.values():
            link.drop_failed()
        self.gateways.wake()
        if self.state.ready != self._ready:
            self._ready = self.state.ready
            self._ready_changed.set()
        self._set_alarm(next_alarm(self.state))
        for holds, future in list(self._waiting):
            if not future.done() and holds():
                future.set_result(None)

    def _set_alarm(self, at: float | None) -> None:
        if at == self._alarm_at:
            return
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm, self._alarm_at = None, at
        if at is not None:
            delay = max(0.0, at - time.monotonic())
            self._alarm = asyncio.get_running_loop().call_later(delay, self._ring)

    def _ring(self) -> None:
        self._alarm = self._alarm_at = None
        self.kick()

    async def _tell_readiness(self) -> None:
        while True:
            await self._ready_changed.wait()
            self._ready_changed.clear()
            await self._on_ready(self._ready)


def limits(settings: SchedulerSettings) -> Limits:
    """The settings that the core's decisions depend on."""
    return Limits(
        step_tokens=settings.step_tokens,
        max_queued=settings.max_queued,
        max_queued_tenant=settings.max_queued_tenant,
        policy=make_policy(settings.policy, settings.ageing_seconds),
        infeasible=settings.infeasible,
        output_cost=settings.output_cost,
        grant_seconds=settings.grant_ms / 1000,
        gap_seconds=settings.gap_ms / 1000,
        gap_stretch=settings.gap_stretch,
        lookahead_tokens=settings.lookahead_tokens,
        speculation=parse_speculation(settings.speculation),
        resume_seconds=settings.resume_seconds,
        stall_seconds=settings.stall_seconds,
    )
