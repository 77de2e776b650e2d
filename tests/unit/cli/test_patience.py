"""What is said while no answer comes."""

from __future__ import annotations

import threading

import pytest

from quire.cli.patience import patience, reason
from quire.client import Client
from quire.v1 import admin_pb2
from tests.unit.cli.conftest import Gateway


def status() -> admin_pb2.GetStatusResponse:
    made = admin_pb2.GetStatusResponse()
    queue = made.scheduler.queues.add(model="m", waiting_count=1)
    queue.waiting.add(request_id="a", reason="no executor takes sequences of this model")
    queue.admissions.add(request_id="b", target="here:1")
    return made


def test_reasons() -> None:
    made = status()
    assert reason(made, "a") == "the request waits: no executor takes sequences of this model"
    assert reason(made, "b") == "here:1 computes the prompt"
    assert reason(made, "c") == "the prompt is being computed"
    made.scheduler.queues[0].waiting_count = 31
    assert reason(made, "c") == "the request waits far back in the queue, among 30 sequences"
    assert reason(admin_pb2.GetStatusResponse(), "a") == "the request waits: the scheduler does not answer"


@pytest.mark.parametrize("is_there", [True, False])
def test_who_waits_long_is_told_why(
    gateway: tuple[Gateway, str], capsys: pytest.CaptureFixture[str], is_there: bool
) -> None:
    said, pause = "", threading.Event()
    with Client(gateway[1] if is_there else "127.0.0.1:9") as client, patience(client, seconds=0.0):
        while "\n" not in said:
            pause.wait(0.01)
            said += capsys.readouterr().err
    if is_there:
        assert said == "quire: the request waits: the scheduler does not answer\n"
    else:
        assert said.startswith("quire: no answer yet, nor does the gateway say why: ")
