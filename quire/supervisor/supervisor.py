"""Runs the services of one machine until asked to stop: start, readiness, signals, drain in reverse order."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field

from quire.supervisor.child import Child, ServiceFailed
from quire.supervisor.layout import ServiceSpec
from quire.supervisor.merged_log import MergedLog
from quire.supervisor.restart import RestartPolicy
from quire.supervisor.rundir import RunDirectory, RunState

KILL_AFTER_DRAIN = 5.0
"""Seconds that a service has beyond its own drain time before it is killed."""


@dataclass(slots=True)
class Supervisor:
    """Owns the processes of a run and its state file."""

    specs: list[ServiceSpec]
    drain_seconds: float
    directory: RunDirectory
    state: RunState
    log: MergedLog
    policy: RestartPolicy = field(default_factory=RestartPolicy)

    async def run(self, when_ready: Callable[[], Awaitable[None]]) -> int:
        """Starts everything, calls `when_ready` once all are healthy, serves until SIGTERM or SIGINT.

        Returns the exit status.
        """
        children = [Child(spec, self.log, self.policy, self._write) for spec in self.specs]
        self.state.services = [child.state for child in children]
        lives = [asyncio.create_task(child.run()) for child in children]
        with _signals(children) as stop:
            work = asyncio.create_task(self._serve(children, when_ready))
            asked = asyncio.create_task(stop.wait())
            await asyncio.wait({work, asked}, return_when=asyncio.FIRST_COMPLETED)
            work.cancel()
            asked.cancel()
            (outcome,) = await asyncio.gather(work, return_exceptions=True)
            await self._stop(children)
            await asyncio.gather(*lives)
        if isinstance(outcome, ServiceFailed):
            self._failed(outcome)
            return 1
        if isinstance(outcome, Exception):
            raise outcome
        return 0

    async def _serve(self, children: list[Child], when_ready: Callable[[], Awaitable[None]]) -> None:
        await asyncio.gather(*(child.first_healthy for child in children))
        self.state.phase = "running"
        self._write()
        await when_ready()
        await asyncio.Event().wait()

    async def _stop(self, children: list[Child]) -> None:
        """Ends services in reverse order, each after it drained. Replicas of a role end together."""
        self.state.phase = "stopping"
        self._write()
        waiting = list(reversed(children))
        while waiting:
            role = waiting[0].spec.role
            together = [child for child in waiting if child.spec.role == role]
            waiting = [child for child in waiting if child.spec.role != role]
            await asyncio.gather(*(child.stop(self.drain_seconds + KILL_AFTER_DRAIN) for child in together))

    def _failed(self, failure: ServiceFailed) -> None:
        self.state.phase = "failed"
        said = "".join(f"\n  {line}" for line in self.log.recent(failure.name))
        self.state.problem = f"{failure}; its last lines:{said}" if said else str(failure)
        self._write()

    def _write(self) -> None:
        self.directory.write(self.state)


@contextlib.contextmanager
def _signals(children: list[Child]) -> Iterator[asyncio.Event]:
    """The first SIGTERM or SIGINT sets the event; a second one kills everything. A closed terminal (SIGHUP) counts."""
    stop = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            for child in children:
                child.signal(signal.SIGKILL)
        stop.set()

    loop = asyncio.get_running_loop()
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, on_signal)
    try:
        yield stop
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
