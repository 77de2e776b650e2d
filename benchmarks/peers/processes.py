"""Runs other programs so that none of them outlives the measurement."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

POLL_SECONDS = 0.2
GRACE_SECONDS = 15.0
TOLD_LINES = 15  # of a failed program's log


Command = Sequence[str | Path]


class PeerError(Exception):
    """A program failed. The message is for the user."""


def run(command: Command, log: Path, timeout: float, environment: Mapping[str, str] | None = None) -> str:
    """Standard output of a program that ended well; its standard error is added to `log`.

    Raises PeerError where it failed or took longer than `timeout` seconds.
    """
    with log.open("ab") as errors, _started(command, environment, subprocess.PIPE, errors) as process:
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            raise PeerError(f"{_name(command)} took longer than {timeout:g} s; see {log}") from None
    if process.returncode:
        raise PeerError(f"{_name(command)} ended with {process.returncode}\n{output.decode()}{_tail(log)}")
    return output.decode()


@contextmanager
def serving(
    command: Command,
    ready_url: str,
    log: Path,
    timeout: float,
    environment: Mapping[str, str] | None = None,
) -> Iterator[None]:
    """A server inside the `with` block, from the moment on that `ready_url` answers with 200."""
    with log.open("ab") as output, _started(command, environment, output, output) as process:
        deadline = time.monotonic() + timeout
        while not _answers(ready_url):
            if process.poll() is not None:
                raise PeerError(f"{_name(command)} ended with {process.returncode} at start\n{_tail(log)}")
            if time.monotonic() > deadline:
                raise PeerError(f"{_name(command)} was not ready within {timeout:g} s; see {log}")
            time.sleep(POLL_SECONDS)
        yield


@contextmanager
def spinning() -> Iterator[None]:
    """A process that keeps one core busy."""
    command = ["sh", "-c", "while :; do :; done"]
    with _started(command, None, subprocess.DEVNULL, subprocess.DEVNULL):
        yield


def unwind_on_terminate() -> None:
    """Makes SIGTERM end this process as Ctrl-C does, so that `with` blocks end what they started."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)


@contextmanager
def _started(
    command: Command, environment: Mapping[str, str] | None, output: int | IO[bytes], errors: int | IO[bytes]
) -> Iterator[subprocess.Popen[bytes]]:
    """A program in a session of its own, which is ended with all its children."""
    process = subprocess.Popen(
        [str(part) for part in command],
        env=os.environ | dict(environment or {}),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=errors,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    _signal_group(process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_SECONDS)
    _signal_group(process.pid, signal.SIGKILL)
    process.wait()


def _signal_group(group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, number)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _name(command: Command) -> str:
    return " ".join(str(part) for part in command[:3])


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-TOLD_LINES:])
