"""Programs that fail, take too long or leave children behind."""

from __future__ import annotations

import socket
import sys
import time
from pathlib import Path

import psutil
import pytest

from benchmarks.peers.processes import PeerError, run, serving, spinning


def gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody has collected yet has."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children()}


def eventually_gone(pid: int) -> bool:
    deadline = time.monotonic() + 20
    while not gone(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return gone(pid)


def test_output_and_errors_go_apart(tmp_path: Path) -> None:
    log = tmp_path / "log"
    code = "import os, sys; print(os.environ['X']); print('told', file=sys.stderr)"
    assert run([sys.executable, "-c", code], log, 60.0, {"X": "value"}) == "value\n"
    assert log.read_text() == "told\n"


def test_a_failure_tells_the_end_of_the_log(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match=r"(?s)ended with 3.*the reason"):
        run(["sh", "-c", "echo the reason >&2; exit 3"], tmp_path / "log", 60.0)


def test_what_takes_too_long_is_ended_with_its_children(tmp_path: Path) -> None:
    child = tmp_path / "child"
    with pytest.raises(PeerError, match="longer than"):
        run(["sh", "-c", f"sleep 600 & echo $! > {child}; wait"], tmp_path / "log", 1.0)
    assert eventually_gone(int(child.read_text()))


def test_a_server_lives_as_long_as_its_block(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command: list[str | Path] = [
        sys.executable,
        "-m",
        "http.server",
        port,
        "--bind",
        "127.0.0.1",
        "--directory",
        tmp_path,
    ]
    before = children()
    with serving(command, f"http://127.0.0.1:{port}/", tmp_path / "log", 60.0):
        (pid,) = children() - before
        assert not gone(pid)
    assert gone(pid)


def test_a_server_that_ends_at_once_is_an_error(tmp_path: Path) -> None:
    with (
        pytest.raises(PeerError, match=r"(?s)ended with 7 at start.*no such model"),
        serving(["sh", "-c", "echo no such model >&2; exit 7"], "http://127.0.0.1:9/", tmp_path / "log", 30.0),
    ):
        pytest.fail("it was never ready")


def test_a_busy_neighbour_ends_with_its_block() -> None:
    before = children()
    with spinning():
        (pid,) = children() - before
        assert not gone(pid)
    assert gone(pid)
