"""`quire up`, from options to exit status: in the foreground, or detached with the terminal given back."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TextIO

import grpc

from quire.supervisor import greeting, layout, ports
from quire.supervisor.merged_log import MergedLog
from quire.supervisor.options import UpOptions
from quire.supervisor.rundir import RunDirectory, RunState
from quire.supervisor.supervisor import Supervisor
from services.common.topology_sysfs import read_topology, usable_cpus
from services.executor.gpus import cuda_devices

MODELS_APPEAR_SECONDS = 60.0


class UpError(Exception):
    """What keeps a run from starting, in words for a person."""


def prepare(options: UpOptions, directory: RunDirectory) -> list[layout.ServiceSpec]:
    """The services to start, once nothing stands in the way: no other run, free ports, models at hand.

    Downloads what is missing, with a progress bar. Raises UpError.
    """
    if (live := directory.live()) is not None:
        raise UpError(_already_up(live))
    specs = layout.lay_out(options, len(usable_cpus()), _node_cores(options))
    if taken := ports.problems(specs):
        raise UpError("\n".join(taken))
    _fetch_models(options)
    return specs


def run_foreground(
    options: UpOptions, directory: RunDirectory, *, log: Path | None, terminal: TextIO | None, demo: bool
) -> int:
    """Serves until a signal; prints the merged log, a first answer and where to connect to `terminal`."""
    specs = prepare(options, directory)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(directory.hold())
        except BlockingIOError:
            live = directory.live()
            raise UpError(_already_up(live) if live else "another `quire up` is just starting") from None
        path = log or directory.new_log()
        state = _first_state(options, path)
        directory.write(state)
        merged = MergedLog(path, [spec.name for spec in specs], terminal)
        stack.callback(merged.close)
        supervisor = Supervisor(specs, options.drain_seconds, directory, state, merged)

        async def when_ready() -> None:
            with merged.hold_terminal():
                await greet(state, terminal, demo=demo)

        status = asyncio.run(supervisor.run(when_ready))
        if state.problem:
            raise UpError(state.problem)
        return status


async def greet(state: RunState, out: TextIO | None, *, demo: bool) -> None:
    """Waits until the models can be asked for, then shows them. Asks with the API key of $QUIRE_API_KEY, if any."""
    api_key, is_locked = os.environ.get("QUIRE_API_KEY", ""), False
    try:
        async with asyncio.timeout(MODELS_APPEAR_SECONDS):
            await greeting.wait_for_model(state.grpc, state.models, api_key)
        if out is not None and demo:
            await greeting.first_answer(state.grpc, state.models[0], api_key, out)
    except (grpc.aio.AioRpcError, TimeoutError, ValueError) as error:
        is_locked = not api_key and _asks_for_key(error)
        if not is_locked:  # the services are up and say so; the log shows what is wrong with this request
            print(f"quire up: the first request failed: {_in_words(error)}", file=sys.stderr)
    if out is not None:
        print(f"\n{greeting.where_to_connect(state, is_locked)}\n", file=out, flush=True)


def _asks_for_key(error: Exception) -> bool:
    return isinstance(error, grpc.aio.AioRpcError) and error.code() == grpc.StatusCode.UNAUTHENTICATED


def _in_words(error: Exception) -> str:
    if not isinstance(error, grpc.aio.AioRpcError):
        return str(error) or "no answer in time"
    return error.details() or error.code().name


def run_detached(options: UpOptions, directory: RunDirectory, arguments: list[str]) -> RunState:
    """Starts a run in the background and returns once it is ready. `arguments` are those of `quire up` itself."""
    prepare(options, directory)
    path = directory.new_log()
    command = [sys.executable, "-m", "quire.cli", "up", *arguments, "--no-demo", "--log-file", str(path)]
    with path.open("ab") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    while process.poll() is None:
        state = directory.read()
        if state is not None and state.pid == process.pid and state.phase == "running":
            return state
        time.sleep(0.05)
    state = directory.read()
    if state is not None and state.pid == process.pid and state.problem:
        raise UpError(state.problem)
    said = "\n".join(path.read_text(errors="replace").splitlines()[-8:])
    raise UpError(f"the services ended at their start (log: {path})\n{said}")


def _first_state(options: UpOptions, log: Path) -> RunState:
    return RunState(
        pid=os.getpid(),
        started_at=time.time(),
        log=str(log),
        grpc=f"{layout.HOST}:{options.ports.grpc}",
        http=f"http://{layout.HOST}:{options.ports.http}",
        models=[model.name for model in options.models],
    )


def _fetch_models(options: UpOptions) -> None:
    from services.common.errors import QuireError
    from services.executor.models.source import resolve

    for model in options.models:
        try:
            resolve(model.source)
        except QuireError as error:
            raise UpError(error.message) from error


def _node_cores(options: UpOptions) -> dict[int, int]:
    """CPUs of each NUMA node that this process may use; none where GPUs may compute, beside which executors settle."""
    if options.backend != "cpu" and cuda_devices():
        return {}
    topology = read_topology()
    return {node.node_id: len(node.cpus & topology.cpus) for node in topology.usable}


def _already_up(live: RunState) -> str:
    return (
        f"already up (process {live.pid}, gRPC on {live.grpc}); `quire status` shows it, `quire down` ends it\n"
        "a second one beside it needs a folder and ports of its own: QUIRE_RUN_DIR=FOLDER quire up --port-base PORT"
    )
