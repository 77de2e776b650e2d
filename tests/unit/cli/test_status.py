"""`quire status` where something is down."""

from __future__ import annotations

import json
from typing import Any

import grpc
import pytest

from quire import cli
from quire.cli.common import in_words
from quire.cli.status import _text
from quire.v1 import kvmanager_pb2, scheduler_status_pb2, types_pb2
from tests.unit.cli.conftest import Gateway

BF16_ON_DEVICE = types_pb2.BlockPool(tier=types_pb2.TIER_DEVICE, format=types_pb2.KV_FORMAT_BF16)


def test_an_absent_service_is_named(gateway: tuple[Gateway, str], capsys: pytest.CaptureFixture[str]) -> None:
    made, address = gateway

    def said() -> tuple[int, Any]:
        status = cli.main(["status", "--json", "--address", address])
        return status, json.loads(capsys.readouterr().out)

    status, report = said()
    assert (status, report["error"], report["running"]) == (1, "the scheduler does not answer", True)
    made.status.scheduler.SetInParent()
    status, report = said()
    assert (status, report["error"], report["running"]) == (1, "the kvmanager does not answer", True)
    pool = kvmanager_pb2.PoolStatus(free_count=7, pool=BF16_ON_DEVICE)
    made.status.scheduler.CopyFrom(scheduler_status_pb2.GetSchedulerStatusResponse(waiting_count=3))
    made.status.scheduler.kv.pools.append(pool)
    status, report = said()
    assert (status, report["error"], report["healthy"]) == (0, None, True)
    cli.main(["status", "--address", address])
    assert capsys.readouterr().out == (
        "requests: 0 open; sequences: 0 running, 3 waiting\nkv blocks, device bf16: 7 free, 0 cached, 0 in use\n"
    )


def test_blocks_are_named_by_model_and_executor(
    gateway: tuple[Gateway, str], capsys: pytest.CaptureFixture[str]
) -> None:
    made, address = gateway
    scheduler = made.status.scheduler
    busy = scheduler.executors.add(target="127.0.0.1:1", connected=True)
    busy.description.executor_id = "a"
    busy.description.model.name = "m"
    busy.description.backend, busy.description.device, busy.description.dtype = "cpu", "cpu avx2, 2 threads", "q4_1"
    scheduler.executors.add(target="127.0.0.1:2", connected=True).description.executor_id = "b"
    scheduler.executors.add(target="127.0.0.1:3")  # never came: its service line says so
    scheduler.kv.pools.add(executor_id="a", free_count=7, pool=BF16_ON_DEVICE)
    cli.main(["status", "--address", address])
    assert capsys.readouterr().out.splitlines()[1:] == [
        "executor 127.0.0.1:1: m, in use, cpu backend, cpu avx2, 2 threads, q4_1",
        "executor 127.0.0.1:2: no model",
        "kv blocks of m on 127.0.0.1:1, device bf16: 7 free, 0 cached, 0 in use",
    ]


def test_a_model_that_nobody_serves_is_named(gateway: tuple[Gateway, str], capsys: pytest.CaptureFixture[str]) -> None:
    made, address = gateway
    made.models.append(types_pb2.ModelDescription(name="m", architecture="llama"))
    drained = made.status.scheduler.executors.add(target="127.0.0.1:1", connected=True, draining=True)
    drained.description.model.name = "m"
    made.status.scheduler.kv.SetInParent()
    assert cli.main(["status", "--json", "--address", address]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["unserved"], report["executors"][0]["state"]) == (["m"], "drained")
    cli.main(["status", "--address", address])
    lines = capsys.readouterr().out.splitlines()
    assert "executor 127.0.0.1:1: m, drained,  backend, , " in lines
    assert lines[-1].startswith("no executor takes requests for m: they wait")


def test_a_service_is_healthy_only_by_its_own_word() -> None:
    """The supervisor may not have noticed: it watches the process."""
    service = {"name": "scheduler", "target": "127.0.0.1:1", "pid": 3, "restarts": 0, "state": "healthy"}
    report: dict[str, Any] = {"uptime_seconds": 1, "phase": "running", "log": "x", "error": "oh", "models": []}
    report |= {"queue": {}, "kv": {}}

    def line(**more: Any) -> str:
        return _text(report | {"services": [service | {"healthy": False} | more]}).splitlines()[1]

    assert line(healthy=True, health="SERVING").endswith("pid 3  healthy")
    assert line(health="UNREACHABLE").endswith("pid 3  does not answer")
    assert line(health="NOT_SERVING").endswith("pid 3  not ready")
    assert line(health="UNREACHABLE", state="starting").endswith("pid 3  starting")


def test_what_the_gateway_answered_is_not_taken_for_its_absence() -> None:
    unavailable = grpc.StatusCode.UNAVAILABLE
    assert "is `quire up` running?" in in_words(unavailable, "failed to connect to all addresses", "here:1")
    said = in_words(unavailable, "executor there:2: failed to connect", "here:1", "EXECUTOR_LOST")
    assert said == "executor there:2: failed to connect (UNAVAILABLE)"


def test_drafts_are_told_of(gateway: tuple[Gateway, str], capsys: pytest.CaptureFixture[str]) -> None:
    made, address = gateway
    for proposer, draft in (("ngram", ""), ("early_exit", "3 layers")):
        executor = made.status.scheduler.executors.add(target="127.0.0.1:1", connected=True)
        executor.description.model.name = "m"
        executor.description.speculation.proposer, executor.description.speculation.draft = proposer, draft
        executor.speculation.mode = "auto"
    drafts = made.status.scheduler.executors[1].speculation
    drafts.mode, drafts.step_count, drafts.proposed_count, drafts.accepted_count = "4", 10, 30, 12
    drafts.proposed_by_position.extend([10, 10, 10, 0])
    drafts.accepted_by_position.extend([9, 2, 1, 0])
    drafts.steps_by_limit.extend([0, 0, 5, 0, 5])
    drafts.saved_seconds = 1.25
    cli.main(["status", "--address", address])
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("drafts")] == [
        "drafts of 127.0.0.1:1: ngram, auto",
        "drafts of 127.0.0.1:1: early-exit 3 layers, 4; 12 of 30 accepted (40%; by position 90%, 20%, 10%, -), "
        "up to 3.0 a step, 1.2 s saved",
    ]
