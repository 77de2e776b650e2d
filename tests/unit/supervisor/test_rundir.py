import io
import os
from pathlib import Path

import pytest

from quire.supervisor.merged_log import MergedLog
from quire.supervisor.rundir import KEPT_LOGS, RunDirectory, RunState, ServiceState


def state() -> RunState:
    service = ServiceState("gateway", "gateway", "127.0.0.1:1", "", pid=5)
    return RunState(pid=os.getpid(), started_at=1.0, log="x", grpc="g", http="h", services=[service])


def test_a_run_is_alive_only_while_its_lock_is_held(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "new")
    assert directory.live() is None
    with directory.hold():
        directory.write(state())
        assert directory.live() == state()
        with pytest.raises(BlockingIOError), RunDirectory(tmp_path / "new").hold():
            pass
    assert directory.live() is None
    assert directory.read() == state()


def test_a_damaged_state_is_no_state(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text('{"pid": 1')
    assert RunDirectory(tmp_path).read() is None


def test_old_logs_go(tmp_path: Path) -> None:
    for index in range(9):
        (tmp_path / f"run-2020010{index}-000000-1.log").touch()
    newest = RunDirectory(tmp_path).new_log()
    logs = sorted(tmp_path.glob("run-*.log"))
    assert len(logs) == KEPT_LOGS
    assert logs[-1] == newest


def test_merged_lines_carry_aligned_names(tmp_path: Path) -> None:
    log = MergedLog(tmp_path / "log", ["a", "longer"], None)
    log.line("a", "one")
    log.line("longer", "two")
    assert (tmp_path / "log").read_text() == "a      | one\nlonger | two\n"
    assert log.recent("longer") == ["two"]
    log.close()


def test_lines_held_off_the_terminal_follow(tmp_path: Path) -> None:
    terminal = io.StringIO()
    log = MergedLog(tmp_path / "log", ["a"], terminal)
    with log.hold_terminal():
        log.line("a", "one")
        terminal.write("an answer\n")
    log.line("a", "two")
    assert terminal.getvalue() == "an answer\na | one\na | two\n"
    assert (tmp_path / "log").read_text() == "a | one\na | two\n"
    log.close()
