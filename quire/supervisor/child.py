"""One service's process, over its lives: start, output, death, restart, end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable

from quire.supervisor.health import wait_serving
from quire.supervisor.layout import SUPERVISOR_PID, ServiceSpec
from quire.supervisor.merged_log import MergedLog
from quire.supervisor.restart import GiveUp, History, RestartPolicy, decide, describe_exit
from quire.supervisor.rundir import ServiceState

LONGEST_LINE = 64 * 1024


class Child:
    """Keeps one service running until `stop`. Calls `changed` whenever `state` is another.

    `first_healthy` resolves once the service was healthy for the first time; it fails with ServiceFailed where
    the service is given up.
    """

    def __init__(self, spec: ServiceSpec, log: MergedLog, policy: RestartPolicy, changed: Callable[[], None]) -> None:
        self.spec = spec
        self.state = ServiceState(spec.name, spec.role, spec.target, spec.health_service)
        self.first_healthy: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._log, self._policy, self._changed = log, policy, changed
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = asyncio.Event()
        self._healthy_since: float | None = None

    async def run(self) -> None:
        """Lives and restarts until `stop` or until given up."""
        history = History()
        while not self._stopping.is_set():
            self._healthy_since = None
            status = await self._live()
            if self._stopping.is_set():
                break
            healthy = None if self._healthy_since is None else time.monotonic() - self._healthy_since
            history = history.after_death(healthy, self._policy)
            decision = decide(history, status, self._policy)
            self.state.last_exit = describe_exit(status)
            if isinstance(decision, GiveUp):
                self._set("ended", pid=None)
                self._fail(f"{self.spec.name}: {decision.why} ({self.state.last_exit})")
                return
            how = "ended in order" if status == 0 else f"died with {self.state.last_exit}"
            self._log.line(self.spec.name, f"{how}; starting again in {decision.delay:g} s")
            self._set("waiting", pid=None)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), decision.delay)
            self.state.restarts += 1
        self._set("ended", pid=None)

    async def stop(self, grace: float) -> None:
        """Asks the process to end, and ends it after `grace` seconds. Returns once it is gone."""
        self._stopping.set()
        if self._process is None or self._process.returncode is not None:
            return
        self._set("stopping", pid=self.state.pid)
        self.signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self._process.wait(), grace)
        except TimeoutError:
            self._log.line(self.spec.name, f"did not end within {grace:g} s; killed")
            self.signal(signal.SIGKILL)
            await self._process.wait()

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to the process, if it runs."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def _live(self) -> int:
        """One life, to its exit status."""
        spec = self.spec
        self._process = await asyncio.create_subprocess_exec(
            *spec.command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, **spec.environment, SUPERVISOR_PID: str(os.getpid())},
            # A session of its own: the terminal's Ctrl-C reaches the supervisor alone, which ends services in order.
            start_new_session=True,
            limit=LONGEST_LINE,
        )
        self._set("starting", pid=self._process.pid)
        pump = asyncio.create_task(self._pump(self._process))
        health = asyncio.create_task(self._await_health())
        status = await self._process.wait()
        health.cancel()
        # What it wrote last is read to its end, unless a process of its own still holds the pipe.
        await asyncio.wait({pump}, timeout=1.0)
        pump.cancel()
        await asyncio.gather(pump, health, return_exceptions=True)
        return status

    async def _await_health(self) -> None:
        await wait_serving(self.spec.target, self.spec.health_service)
        self._healthy_since = time.monotonic()
        self._set("healthy", pid=self.state.pid)
        if not self.first_healthy.done():
            self.first_healthy.set_result(None)

    async def _pump(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while True:
            try:
                line = await process.stdout.readline()
            except ValueError:  # longer than any real line; what is left of it follows
                line = b"(a line too long to show)\n"
            if not line:
                return
            self._log.line(self.spec.name, line.decode(errors="replace").rstrip())

    def _set(self, state: str, *, pid: int | None) -> None:
        self.state.state, self.state.pid = state, pid
        self._changed()

    def _fail(self, message: str) -> None:
        if not self.first_healthy.done():
            self.first_healthy.set_exception(ServiceFailed(message, self.spec.name))
        else:
            self._log.line(self.spec.name, message)


class ServiceFailed(Exception):
    """A service is given up. `name` says which."""

    def __init__(self, message: str, name: str) -> None:
        super().__init__(message)
        self.name = name
