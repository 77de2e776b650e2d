"""Requests whose gateway is gone: they go on, somebody attaches to them, or nobody does in time."""

from __future__ import annotations

import pytest

from quire.v1 import scheduler_pb2, types_pb2
from services.scheduler import requests
from services.scheduler.alarms import next_alarm
from services.scheduler.orphans import end_all
from services.scheduler.state import Gateway
from tests.unit.scheduler.sim import Harness, assert_correct, submit
from tests.unit.scheduler.sim_executor import describe

KEEP_MS = 5000


def begun(*submits: scheduler_pb2.Submit) -> Harness:
    """Each request has some output."""
    harness = Harness(describe(blocks=200))
    harness.send(*submits)
    for _ in range(5000):
        if all(client.outputs[0] for client in harness.clients.values()):
            return harness
        assert harness.step()
    raise AssertionError("no output")


def lose_gateway(harness: Harness) -> None:
    requests.close_gateway(harness.state, harness.gateway, harness.now)
    harness.turn()


def attach(harness: Harness, handle: int, *, lost: int = 0, tenant: str = "default") -> None:
    """Another gateway takes over; what the first one got last is lost with it."""
    client = harness.clients[handle]
    for output in client.outputs.values():
        del output[len(output) - lost :]
    client.started.clear()
    client.ends.clear()
    if not harness.gateway.open:
        harness.gateway = requests.open_gateway(harness.state, "other", harness.now)
    asked = scheduler_pb2.Attach(
        handle=handle,
        tenant=tenant,
        request_id=client.submit.request_id,
        next_positions=[len(client.outputs[choice]) for choice in range(client.submit.choice_count)],
    )
    harness.send(attaches=[asked])


def test_an_orphan_goes_on_where_it_was() -> None:
    """Nothing is computed twice, and what the first gateway did not hand on comes again."""
    harness = begun(submit(1, [1] * 20, 60, ignore_eos=True, keep_ms=KEEP_MS, choice_count=2), submit(2, [2], 60))
    lose_gateway(harness)
    assert [request.request_id for request in harness.state.request_ids.values()] == ["r1"]  # the other one ended
    for _ in range(40):
        harness.step()
    attach(harness, 1, lost=1)
    harness.settle()
    del harness.clients[2]
    assert_correct(harness, 1)
    assert harness.executor(0).counters.prompt_tokens == 20 + 1
    assert not harness.state.orphans
    assert harness.state.orphan_ends.peek() is None


def test_one_that_ended_meanwhile_is_told_whole() -> None:
    harness = begun(submit(1, [1, 2, 3], 12, keep_ms=KEEP_MS))
    lose_gateway(harness)
    for _ in range(2000):
        if not harness.state.request_ids:
            break
        harness.step()
    assert len(harness.state.orphans) == 1
    attach(harness, 1, lost=len(harness.clients[1].outputs[0]))
    assert_correct(harness, 1)
    attach(harness, 1)  # it was handed over: nobody has it any more
    assert harness.clients[1].ends[0].error.reason == "NOT_FOUND"


def test_nobody_comes() -> None:
    harness = begun(submit(1, [1, 2], 600, ignore_eos=True, keep_ms=KEEP_MS))
    lose_gateway(harness)
    assert next_alarm(harness.state) == pytest.approx(harness.now + 5.0)
    harness.now += 4.9
    harness.turn()
    assert harness.state.request_ids
    harness.now += 0.2
    harness.turn()
    assert not harness.state.request_ids
    assert not harness.state.orphans
    harness.settle()
    assert not harness.kv.held


def test_a_live_stream_is_taken_over() -> None:
    """The gateway that has it hears so, and once only."""
    harness = begun(submit(1, [1] * 20, 60, ignore_eos=True, keep_ms=KEEP_MS))
    first: Gateway = harness.gateway
    harness.gateway = requests.open_gateway(harness.state, "other", harness.now)
    attach(harness, 1, lost=1)
    (told,) = first.take_output().ended
    assert (told.handle, told.error.reason) == (1, "TAKEN_OVER")
    requests.serve(
        harness.state, first, scheduler_pb2.ServeRequest(cancels=[scheduler_pb2.Cancel(handle=1)]), harness.now
    )
    requests.close_gateway(harness.state, first, harness.now)
    harness.settle()
    assert_correct(harness, 1)
    assert not first.has_output


def test_an_orphan_that_was_held_goes_on() -> None:
    harness = begun(submit(1, [1] * 20, 60, ignore_eos=True, keep_ms=KEEP_MS))
    harness.send(holds=[scheduler_pb2.Hold(handle=1, held=True)])
    lose_gateway(harness)
    harness.settle()
    attach(harness, 1)
    harness.settle()
    assert_correct(harness, 1)


@pytest.mark.parametrize("fields", [{}, {"keep_ms": KEEP_MS, "scores": True}])
def test_what_is_not_kept_ends_with_its_stream(fields: dict[str, object]) -> None:
    """Log probabilities are told once: whoever lacks some has the request computed again."""
    scores = fields.pop("scores", False)
    one = submit(1, [1] * 20, 200, ignore_eos=True, **fields)
    if scores:
        one.logprobs.CopyFrom(types_pb2.LogprobOptions(output_count=0))
    harness = begun(one)
    lose_gateway(harness)
    assert not harness.state.request_ids
    attach(harness, 1)
    assert harness.clients[1].ends[0].error.reason == "NOT_FOUND"


def test_only_its_tenant_attaches_and_only_with_all_choices() -> None:
    harness = begun(submit(1, [1] * 20, 60, ignore_eos=True, keep_ms=KEEP_MS))
    lose_gateway(harness)
    attach(harness, 1, tenant="another")
    assert harness.clients[1].ends[0].error.reason == "NOT_FOUND"
    assert harness.state.request_ids  # and it still waits for its own
    asked = scheduler_pb2.Attach(handle=1, tenant="default", request_id="r1", next_positions=[0, 0])
    harness.clients[1].ends.clear()
    harness.send(attaches=[asked])
    assert harness.clients[1].ends[0].error.reason == "NOT_FOUND"
    assert not harness.state.request_ids


def test_a_drain_waits_for_no_orphan() -> None:
    harness = begun(submit(1, [1] * 20, 60, ignore_eos=True, keep_ms=KEEP_MS))
    lose_gateway(harness)
    harness.state.draining = True
    end_all(harness.state)
    assert not harness.state.request_ids


def test_the_same_gateway_comes_back() -> None:
    """Its stream broke: what it has is attached to, not computed again."""
    harness = begun(submit(1, [1] * 20, 60, ignore_eos=True, keep_ms=KEEP_MS))
    harness.gateway = requests.open_gateway(harness.state, "g", harness.now)
    attach(harness, 1, lost=1)
    harness.settle()
    assert_correct(harness, 1)
    assert harness.executor(0).counters.prompt_tokens == 20
