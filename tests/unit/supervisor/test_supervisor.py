"""The supervisor over stand-in services: real processes, real signals."""

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

from quire.supervisor.layout import ServiceSpec
from quire.supervisor.merged_log import MergedLog
from quire.supervisor.restart import RestartPolicy
from quire.supervisor.rundir import RunDirectory, RunState
from quire.supervisor.supervisor import Supervisor

FAKE = Path(__file__).parent / "fake_service.py"
QUICK = RestartPolicy(first_delay=0.05, longest_delay=0.2, start_attempts=2)


def spec(name: str, *mode: str) -> ServiceSpec:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = (sys.executable, str(FAKE), str(port), *mode)
    return ServiceSpec(name=name, role=name, command=command, target=f"127.0.0.1:{port}", ports=())


def supervisor(tmp_path: Path, *specs: ServiceSpec, drain: float = 5.0) -> Supervisor:
    directory = RunDirectory(tmp_path)
    log = directory.new_log()
    state = RunState(pid=os.getpid(), started_at=time.time(), log=str(log), grpc="", http="")
    merged = MergedLog(log, [spec.name for spec in specs], None)
    return Supervisor(list(specs), drain, directory, state, merged, QUICK)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(15):
        while not condition():
            await asyncio.sleep(0.02)


async def nothing() -> None:
    pass


async def test_a_service_that_dies_is_started_again(tmp_path: Path) -> None:
    tested = supervisor(tmp_path, spec("a"), spec("b"))
    run = asyncio.create_task(tested.run(nothing))
    await until(lambda: tested.state.phase == "running")
    first = tested.state.services[0].pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    await until(lambda: tested.state.services[0].restarts == 1 and tested.state.services[0].state == "healthy")
    assert tested.state.services[0].pid != first
    assert tested.state.services[0].last_exit == "signal SIGKILL"
    assert tested.state.services[1].restarts == 0
    stored = tested.directory.read()
    assert stored is not None
    assert stored.services[0].restarts == 1
    os.kill(os.getpid(), signal.SIGTERM)
    assert await run == 0
    assert "a | died with signal SIGKILL" in Path(tested.state.log).read_text()


async def test_a_service_that_never_starts_ends_the_run_with_its_last_words(tmp_path: Path) -> None:
    tested = supervisor(tmp_path, spec("good"), spec("bad", "exit", "1"))
    assert await tested.run(nothing) == 1
    assert "bad: it ended 2 times before it was ever healthy (exit status 1)" in tested.state.problem
    assert "cannot read the model" in tested.state.problem
    assert [service.pid for service in tested.state.services] == [None, None]


async def test_refused_settings_are_not_tried_again(tmp_path: Path) -> None:
    tested = supervisor(tmp_path, spec("bad", "exit", "2"))
    assert await tested.run(nothing) == 1
    assert tested.state.services[0].restarts == 0


async def test_stop_while_starting(tmp_path: Path) -> None:
    tested = supervisor(tmp_path, spec("slow", "never-healthy"))
    run = asyncio.create_task(tested.run(nothing))
    await until(lambda: bool(tested.state.services) and tested.state.services[0].pid is not None)
    os.kill(os.getpid(), signal.SIGINT)
    assert await run == 0


async def test_services_end_in_reverse_order_and_the_deaf_are_killed(tmp_path: Path) -> None:
    tested = supervisor(tmp_path, spec("first"), spec("last", "deaf"), drain=-4.5)
    run = asyncio.create_task(tested.run(nothing))
    await until(lambda: tested.state.phase == "running")
    os.kill(os.getpid(), signal.SIGTERM)
    await until(lambda: tested.state.services[1].state == "stopping")
    assert tested.state.services[0].state == "healthy"
    assert await run == 0
    assert "last  | did not end within 0.5 s; killed" in Path(tested.state.log).read_text()


async def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    tested = supervisor(tmp_path, spec("deaf", "deaf"), drain=60.0)
    run = asyncio.create_task(tested.run(nothing))
    await until(lambda: tested.state.phase == "running")
    os.kill(os.getpid(), signal.SIGTERM)
    await until(lambda: tested.state.services[0].state == "stopping")
    os.kill(os.getpid(), signal.SIGTERM)
    async with asyncio.timeout(5):
        assert await run == 0
