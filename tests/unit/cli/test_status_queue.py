"""`quire status --queue`: what the scheduler states of its queues, as tables and as data."""

from __future__ import annotations

import json

import pytest

from quire import cli
from tests.unit.cli.conftest import Gateway

Running = tuple[Gateway, str]
Capture = pytest.CaptureFixture[str]


def fill(made: Gateway) -> None:
    """One model with two tenants, of which one has more waiting than is listed; one model that idles."""
    scheduler = made.status.scheduler
    queue = scheduler.queues.add(model="m", policy="fair", waiting_count=1203, running_count=8)
    queue.tenants.add(
        tenant="a", weight=1, waiting_count=1201, running_count=4, prompt_tokens=51200, output_tokens=900, share=0.51
    )
    queue.tenants.add(
        tenant="", weight=2.5, waiting_count=2, running_count=4, prompt_tokens=70, output_tokens=9, share=0.49
    )
    queue.waiting.add(
        request_id="r1", tenant="a", waited_seconds=2.25, token_count=4096, reason="t0 has no room: 8 of 8"
    )
    queue.waiting.add(
        request_id="r2", choice=3, tenant="", priority=-5, token_count=10, reason="2 of its tenant go first"
    )
    queue.admissions.add(
        request_id="r0",
        tenant="a",
        age_seconds=0.5,
        waited_seconds=1.0,
        target="127.0.0.1:1",
        reason="came first",
        placement_reasons=["the only one", "3 blocks cached"],
    )
    scheduler.queues.add(model="n", policy="fair")
    scheduler.refusals.add(reason="QUEUE_FULL", count=12)
    scheduler.decisions.add(
        what="preempted",
        request_id="r3",
        choice=1,
        tenant="a",
        model="m",
        age_seconds=4.0,
        reason="its client holds it",
    )
    scheduler.decisions.add(what="refused", request_id="r4", age_seconds=61.0, reason="QUEUE_FULL: the queue is full")


def test_as_data(gateway: Running, capsys: Capture) -> None:
    made, address = gateway
    fill(made)
    assert cli.main(["status", "--queue", "--json", "--address", address]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["address"], said["error"]) == (address, None)
    first, second = said["queues"]["models"]
    assert (first["model"], first["policy"], first["waiting_count"]) == ("m", "fair", 1203)
    assert [tenant["share"] for tenant in first["tenants"]] == [0.51, 0.49]
    assert first["waiting"][1]["reason"] == "2 of its tenant go first"
    assert first["admissions"][0]["placement_reasons"] == ["the only one", "3 blocks cached"]
    assert (second["model"], second["waiting"]) == ("n", [])
    assert said["queues"]["refusals"] == {"QUEUE_FULL": 12}
    assert [one["what"] for one in said["queues"]["decisions"]] == ["preempted", "refused"]


def test_as_tables(gateway: Running, capsys: Capture) -> None:
    made, address = gateway
    fill(made)
    assert cli.main(["status", "--queue", "--address", address]) == 0
    assert (
        capsys.readouterr().out
        == """\
m: 8 sequences run, 1,203 wait; policy fair

TENANT  WEIGHT  WAITING  RUNNING  PROMPT TOKENS  OUTPUT TOKENS  SHARE
a            1    1,201        4         51,200            900    51%
(none)     2.5        2        4             70              9    49%

NEXT  TENANT  PRIORITY  WAITED  TOKENS  WHY IT WAITS
r1    a              0   2.2 s   4,096  t0 has no room: 8 of 8
r2/3  (none)        -5   0.0 s      10  2 of its tenant go first
and 1,201 more

ADMITTED  TENANT    AGO  WAITED  EXECUTOR     WHY
r0        a       0.5 s   1.0 s  127.0.0.1:1  came first; the only one; 3 blocks cached

n: 0 sequences run, 0 wait; policy fair

refused: 12 QUEUE_FULL

DECIDED    REQUEST  TENANT  MODEL      AGO  WHY
preempted  r3/1     a       m        4.0 s  its client holds it
refused    r4       (none)  (none)  61.0 s  QUEUE_FULL: the queue is full
"""
    )


def test_an_absent_scheduler_is_named_and_an_absent_kvmanager_is_no_matter(gateway: Running, capsys: Capture) -> None:
    made, address = gateway
    assert cli.main(["status", "--queue", "--address", address]) == 1
    assert capsys.readouterr().out == "the scheduler does not answer\n"
    made.status.scheduler.SetInParent()
    assert cli.main(["status", "--queue", "--address", address]) == 0
    assert capsys.readouterr().out == "no models\n"
