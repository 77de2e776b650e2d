"""The command line against a real run: up, status, generate, models, restart, down."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.models import make_succ_model

Done = subprocess.CompletedProcess[str]


def port_range() -> int:
    """The first of some free ports in a row, away from those that the system hands out."""
    for base in range(21000, 32000, 100):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", base)) != 0:
                return base
    raise AssertionError("no free ports")


@dataclass
class Cli:
    """Runs `quire` with a run directory of its own."""

    folder: Path
    model: Path
    base: int

    def __call__(self, *arguments: str, check: bool = True) -> Done:
        environment = {**os.environ, "QUIRE_RUN_DIR": str(self.folder / "run")}
        environment.pop("QUIRE_ADDRESS", None)
        done = subprocess.run(
            [sys.executable, "-m", "quire.cli", *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert not check or done.returncode == 0, f"{arguments}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def json(self, *arguments: str, check: bool = True) -> Any:
        return json.loads(self(*arguments, "--json", check=check).stdout)

    def up(self, *more: str, check: bool = True) -> Done:
        flags = ["--model", f"tiny={self.model}", "--dtype", "fp32", "--port-base", str(self.base), *more]
        return self("up", *flags, "--detach", check=check)


def make_cli(folder: Path) -> Cli:
    model = make_succ_model(folder / "model", {ord(a): ord(b) for a, b in pairwise("abcd")})
    stated = model / "generation_config.json"
    stated.write_text(json.dumps(json.loads(stated.read_text()) | {"temperature": 0.5}))
    return Cli(folder, model, port_range())


@pytest.fixture(scope="module")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cli]:
    """A run that is up, with a spare executor."""
    made = make_cli(tmp_path_factory.mktemp("cli"))
    said = made.up()
    try:
        assert "Quire serves tiny." in said.stdout
        yield made
    finally:
        made("down", "--now", check=False)


def test_status_shows_every_service_healthy(cli: Cli) -> None:
    status = cli.json("status")
    assert status["running"]
    assert status["healthy"]
    assert [s["name"] for s in status["services"]] == ["kvmanager", "executor-1", "executor-2", "scheduler", "gateway"]
    assert all(s["healthy"] and s["restarts"] == 0 and s["pid"] > 0 for s in status["services"])
    assert [model["name"] for model in status["models"]] == ["tiny"]
    assert status["models"][0]["default_sampling"]["temperature"] == 0.5
    assert status["unserved"] == []
    assert status["queue"] == {"open_requests": 0, "running": 0, "waiting": 0, "preemptions": 0}
    assert sum(pool["free_count"] for pool in status["kv"]["pools"]) > 0
    assert "model tiny" in cli("status").stdout


def test_generate_prints_text_or_json(cli: Cli) -> None:
    assert cli("generate", "a", "--temperature", "0").stdout == "bcd\n"
    answer = cli.json("generate", "a", "--temperature", "0")
    assert answer["text"] == "bcd"
    assert answer["finish_reason"] == "stop"


def test_kv_in_full_is_what_was_planned(cli: Cli) -> None:
    cli("generate", "a", "--temperature", "0")
    kv = cli.json("status", "--kv")["kv"]
    (pool,) = (pool for pool in kv["pools"] if pool["model"] == "tiny")
    assert (pool["tier"], pool["format"], pool["free"] + pool["cached"] + pool["leased"]) == (
        "device", "fp32", pool["blocks"]
    )  # fmt: skip
    assert kv["violations"] == []
    assert kv["prefix"]["query_tokens"] > 0
    plan = cli.json("plan", "--model", str(cli.model), "--memory", "1GiB")
    assert plan["policies"][0]["pools"][0]["block_bytes"] == pool["block_bytes"]
    assert "device  fp32" in cli("status", "--kv").stdout


def test_a_server_error_is_one_line(cli: Cli) -> None:
    done = cli("generate", "a", "--model", "nobody", check=False)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "nobody" in done.stderr


def test_a_second_up_is_refused(cli: Cli) -> None:
    done = cli.up(check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("quire up: already up (process ")
    assert "QUIRE_RUN_DIR=FOLDER quire up --port-base PORT" in done.stderr


def test_models_come_and_go(cli: Cli) -> None:
    other = make_succ_model(cli.folder / "other", {ord("a"): ord("z")})
    names = [model["name"] for model in cli.json("models", "load", f"other={other}")]
    assert sorted(names) == ["other", "tiny"]
    assert cli("generate", "a", "--model", "other", "--temperature", "0").stdout == "z\n"
    make_succ_model(cli.folder / "other", {ord("a"): ord("y")})
    cli("models", "reload", "other")
    assert cli("generate", "a", "--model", "other", "--temperature", "0").stdout == "y\n"
    assert [model["name"] for model in cli.json("models", "unload", "other")] == ["tiny"]
    assert "other" not in cli("models", "list").stdout


@pytest.mark.parametrize("role", ["gateway", "scheduler", "kvmanager", "executor-1"])
def test_a_killed_service_comes_back_and_answers_go_on(cli: Cli, role: str) -> None:
    before = {service["name"]: service for service in cli.json("status")["services"]}
    os.kill(before[role]["pid"], signal.SIGKILL)
    deadline = time.monotonic() + 60
    while True:
        status = cli.json("status", check=False)
        now = {service["name"]: service for service in status["services"]}
        if status["healthy"] and now[role]["restarts"] == before[role]["restarts"] + 1:
            break
        assert time.monotonic() < deadline, status
        time.sleep(0.1)
    assert now[role]["last_exit"] == "signal SIGKILL"
    others = {name for name in before if now[name]["pid"] != before[name]["pid"]}
    assert others == {role}
    assert cli("generate", "a", "--temperature", "0").stdout == "bcd\n"


def test_a_taken_port_is_named_before_anything_starts(tmp_path: Path) -> None:
    cli = make_cli(tmp_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = cli.up("--http-port", str(port), check=False)
    assert done.returncode == 1
    moved = "--http-port PORT moves it, --port-base PORT moves all ports"
    assert done.stderr.endswith(f" (process {os.getpid()}); {moved}\n")
    assert done.stderr.startswith(f"quire up: port {port} is taken by ")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "run" / "state.json").exists()


def test_a_model_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    cli = make_cli(tmp_path)
    (cli.model / "model.safetensors").write_bytes(b"not a model")
    done = cli.up(check=False)
    assert done.returncode == 1
    assert "executor-1" in done.stderr
    assert not cli.json("status", check=False)["running"]


def test_down_ends_everything(tmp_path: Path) -> None:
    cli = make_cli(tmp_path)
    cli.up("--spare-executors", "0", "--no-demo")
    pids = [service["pid"] for service in cli.json("status")["services"]]
    assert len(pids) == 4
    assert cli("down").stdout == "stopped\n"
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert cli("down").stdout == "nothing is running\n"
    # At its own address: another Quire may serve at the default one.
    assert cli("status", "--address", f"127.0.0.1:{cli.base}", check=False).returncode == 1


def test_services_end_with_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    cli = make_cli(tmp_path)
    cli.up("--spare-executors", "0", "--no-demo", "--drain-seconds", "1")
    status = cli.json("status")
    os.kill(status["pid"], signal.SIGKILL)
    deadline = time.monotonic() + 20
    pids = {service["pid"] for service in status["services"]}
    while alive := {pid for pid in pids if Path(f"/proc/{pid}").exists()}:
        assert time.monotonic() < deadline, alive
        time.sleep(0.1)
