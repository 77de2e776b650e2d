"""`quire executors` where nobody is left to serve a model."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quire import cli
from quire.cli.executors import unserved
from quire.v1 import admin_pb2, scheduler_status_pb2, types_pb2
from tests.unit.cli.conftest import Gateway

SAID = "quire executors: no executor takes requests for m: they wait until one does (`quire executors add HOST:PORT`)\n"


def executor(model: str, *, connected: bool = True, draining: bool = False) -> scheduler_status_pb2.ExecutorStatus:
    status = scheduler_status_pb2.ExecutorStatus(target="here:1", connected=connected, draining=draining)
    status.description.model.name = model
    return status


def test_who_is_served() -> None:
    models = [types_pb2.ModelDescription(name="m"), types_pb2.ModelDescription(name="n", members=["m", "o"])]
    assert unserved(models, [executor("m")]) == []
    assert unserved(models, [executor("o")]) == ["m"]
    assert unserved(models, [executor("m", draining=True), executor("m", connected=False)]) == ["m", "n"]
    assert unserved(models, [executor("m", draining=True), executor("m")]) == []


def test_draining_the_last_one_is_no_secret(
    gateway: tuple[Gateway, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made, address = gateway
    made.models.append(types_pb2.ModelDescription(name="m"))
    executors = [executor("m"), executor("m")]
    drained: list[str] = []

    def change(request: Any, context: Any) -> admin_pb2.ChangeExecutorResponse:
        executors[len(drained)].draining = True
        drained.append(request.target)
        return admin_pb2.ChangeExecutorResponse(executors=executors)

    monkeypatch.setattr(made, "change_executor", change)
    assert cli.main(["executors", "drain", "here:1", "--address", address]) == 0
    assert capsys.readouterr().err == ""
    assert cli.main(["executors", "drain", "here:2", "--address", address, "--json"]) == 0
    said = capsys.readouterr()
    assert [one["draining"] for one in json.loads(said.out)] == [True, True]
    assert said.err == SAID
    assert drained == ["here:1", "here:2"]
