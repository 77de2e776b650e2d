"""What is let into the queue: its limits, deadlines and targets."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from quire.v1 import scheduler_pb2
from services.scheduler import requests
from services.scheduler.intake import PATIENCE_SECONDS
from services.scheduler.metrics import TENANTS, SchedulerMetrics
from services.scheduler.policy import fair
from services.scheduler.state import Limits
from tests.unit.scheduler.sim import Harness, submit
from tests.unit.scheduler.sim_executor import describe
from tests.unit.scheduler.test_batcher import place

RATE = 100.0  # prompt tokens per second
REFUSE = Limits(lookahead_tokens=8, infeasible="refuse")


def slow(limits: Limits | None = None, rate: float = RATE) -> Harness:
    """An executor whose prompts take their time, and a kvmanager that is away: all waits."""
    description = describe(blocks=1000, max_sequences=4)
    description.prefill_tokens_per_second = rate
    harness = Harness(description, limits=limits)
    harness.state.kv_connected = False
    return harness


def refusal(harness: Harness, *submits: scheduler_pb2.Submit) -> str:
    """Reason and message with which the last of them was refused; empty where it was taken."""
    harness.send(*submits)
    ends = harness.clients[submits[-1].handle].ends
    assert len(ends) in (0, submits[-1].choice_count)
    return f"{ends[0].error.reason}: {ends[0].error.message}" if ends else ""


def test_a_full_queue_names_its_limit() -> None:
    harness = slow(Limits(max_queued=5))
    assert not refusal(harness, submit(1, [1], choice_count=3), submit(2, [1]))
    said = refusal(harness, submit(3, [1], choice_count=2, tenant="b"))
    assert said.startswith("QUEUE_FULL: the queue is full: 4 sequences wait, 2 more would exceed the limit of 5 ")
    assert harness.clients[3].ends[0].error.retryable
    assert not refusal(harness, submit(4, [1], tenant="b"))


def test_a_tenant_that_fills_its_part_leaves_room_for_others() -> None:
    harness = slow(Limits(max_queued=100, max_queued_tenant=3))
    assert not refusal(harness, submit(1, [1], tenant="a", choice_count=3))
    said = refusal(harness, submit(2, [1], tenant="a"))
    assert said.startswith(
        "QUEUE_FULL: the queue is full for tenant 'a': 3 of its sequences wait, 1 more would exceed "
    )
    assert "max_queued_tenant" in said
    assert not refusal(harness, submit(3, [1], tenant="b"))
    harness.cancel(1)
    assert not refusal(harness, submit(4, [1], tenant="a"))


def test_a_tenant_may_be_left_a_smaller_part_of_the_queue() -> None:
    harness = slow(Limits(max_queued=10, max_queued_tenant=8))
    assert not refusal(harness, submit(1, [1], tenant="a", choice_count=3, queue_share=0.3))
    said = refusal(harness, submit(2, [1], tenant="a", queue_share=0.3))
    assert "3 of its sequences wait, 1 more would exceed the limit of 3 (queue_share)" in said
    assert not refusal(harness, submit(3, [1], tenant="b", queue_share=0.01)), "nobody is left nothing"
    assert not refusal(harness, submit(4, [1], tenant="c", choice_count=4, queue_share=1))


def test_what_runs_takes_no_room_in_the_queue() -> None:
    harness = Harness(describe(max_sequences=4, blocks=200), limits=Limits(lookahead_tokens=8, max_queued_tenant=2))
    for handle in (1, 3):
        assert not refusal(harness, submit(handle, [handle] * 5, 20), submit(handle + 1, [handle + 1] * 5, 20))
        place(harness)
    assert not refusal(harness, submit(5, [5]), submit(6, [6]))
    assert refusal(harness, submit(7, [7])).startswith("QUEUE_FULL")


def test_a_resumed_request_is_taken_whatever_waits() -> None:
    harness = slow(Limits(max_queued=1, infeasible="refuse"))
    assert not refusal(harness, submit(1, [1]))
    resumed = submit(2, [1] * 500, deadline_ms=10)
    resumed.progress.add(choice=0, token_ids=[5])
    assert not refusal(harness, resumed)


def test_refusals_are_counted_by_reason() -> None:
    harness = slow(Limits(max_queued=1))
    refusal(harness, submit(1, [1]), submit(2, [1]), submit(3, [1]), submit(4, []))
    assert harness.state.refusals == {"QUEUE_FULL": 2, "INVALID_FIELD": 1}
    registry = CollectorRegistry()
    registry.register(SchedulerMetrics(harness.state))
    assert registry.get_sample_value("quire_scheduler_refusals_total", {"reason": "QUEUE_FULL"}) == 2


def test_tenants_are_told_apart_as_far_as_there_are_few() -> None:
    harness = slow()
    for handle in range(1, 2 * TENANTS + 1):
        harness.send(submit(handle, [1], tenant=f"t{handle}", choice_count=2 if handle > TENANTS else 1))
    registry = CollectorRegistry()
    registry.register(SchedulerMetrics(harness.state))

    def value(tenant: str, name: str = "waiting") -> float | None:
        labels = {"model_name": "m", "tenant": tenant}
        return registry.get_sample_value(f"quire_scheduler_tenant_{name}", labels)

    assert value(f"t{TENANTS + 1}") == 2  # those with most
    assert value("t1") is None
    assert value("") == TENANTS
    assert value("", "running") == 0


def test_it_starts_by_the_stated_time_less_what_the_prompt_takes() -> None:
    """At the speed of the fastest executor, for it computes on one of them, as that is learned."""
    harness = slow()
    sooner = {"deadline_ms": 2000, "target_first_token_ms": 600}
    for handle, fields in enumerate([{}, {"deadline_ms": 2000}, sooner, {"deadline_ms": 3_600_000}], start=1):
        harness.send(submit(handle, [1] * 50, 4000, **fields))
    starts = [(r.start_by - harness.now, r.must_start_at) for r in harness.state.request_ids.values()]
    assert [start for start, _ in starts] == pytest.approx([PATIENCE_SECONDS, 1.5, 0.1, PATIENCE_SECONDS])
    musts = [must - harness.now if must is not None else None for _, must in starts]
    assert musts[0] is None
    assert musts[1:] == pytest.approx([1.5, 0.1, 3599.5])
    harness.join(describe(executor_id="e1"))
    harness.state.executors[1].step_time.token = 0.002
    harness.send(submit(9, [1] * 50, **sooner))
    assert harness.gateway.requests[9].start_by == pytest.approx(harness.now + 0.5)


def test_deadlines_are_judged_by_learned_speed() -> None:
    """What an executor said of itself at its start may be wrong either way."""
    wanted = [submit(1, [1] * 100, deadline_ms=1000), submit(2, [2] * 10)]
    for stated, learned, is_late in ((1e6, 0.02, True), (1.0, 0.001, False)):
        for limits in (REFUSE, Limits(lookahead_tokens=8)):
            harness = slow(limits, rate=stated)
            harness.state.executors[0].step_time.token = learned
            refused = bool(refusal(harness, wanted[0]))
            assert refused == (is_late and limits is REFUSE)
            harness.send(wanted[1])
            harness.state.kv_connected = True
            harness.turn()
            asked = [r.token_ids[0] for message in harness.to_kv for r in message.reservations]
            # Behind 100 tokens there is no room for more.
            assert asked == ([2] if refused else [2, 1] if is_late else [1])


@pytest.mark.parametrize(("deadline_ms", "refused"), [(0, False), (990, True), (1010, False)])
def test_an_infeasible_request_is_refused_where_the_operator_wants_it(deadline_ms: int, refused: bool) -> None:
    harness = slow(REFUSE)
    said = refusal(harness, submit(1, [1] * 100, deadline_ms=deadline_ms))
    assert bool(said) == refused
    if refused:
        assert said.startswith(
            "DEADLINE: deadline_ms: the first token is expected in 1.00 s, after the deadline in 0.99"
        )
        assert "0 tokens are computed before the prompt's 100, 100 a second" in said
    assert not refusal(slow(), submit(1, [1] * 100, deadline_ms=deadline_ms))


def test_the_estimate_counts_what_comes_before() -> None:
    """Of other tenants no more than their turn, of the own one what starts sooner, of lower classes nothing."""
    harness = slow(REFUSE)
    harness.send(*(submit(h, [1] * 100, tenant="a") for h in range(1, 11)))
    b = [submit(h, [1] * 100, tenant="b", priority=-1) for h in range(11, 16)]
    harness.send(*b, submit(16, [1] * 100, tenant="c", priority=1))

    def ahead(**fields: object) -> int:
        harness.clients.pop(99, None)
        said = refusal(harness, submit(99, [1] * 100, deadline_ms=1, **fields))
        return int(said.split(" s: ")[1].split(" tokens")[0])

    assert ahead(tenant="c", priority=1) == 0  # it is more urgent than its tenant's other one
    assert ahead(tenant="d", priority=1) == 100
    assert ahead(tenant="d", priority=0) == 100 + 100  # one of c, and as much of a as of itself
    assert ahead(tenant="a", priority=0) == 100
    assert ahead(tenant="d", priority=0, tenant_weight=0.25) == 100 + 400
    assert ahead(tenant="d", priority=-1) == 100 + 1000 + 100
    harness.cancel(1)
    assert ahead(tenant="d", priority=-1) == 100 + 900 + 100


def test_the_estimate_counts_what_executors_compute_already() -> None:
    harness = slow(Limits(lookahead_tokens=8, infeasible="refuse", step_tokens=10))
    harness.state.kv_connected = True
    harness.send(submit(1, [1] * 100))
    assert "100 tokens are computed before" in refusal(harness, submit(2, [2] * 10, deadline_ms=5))  # asked for
    place(harness)
    assert "100 tokens are computed before" in refusal(harness, submit(3, [2] * 10, deadline_ms=5))  # prefilling


def test_what_expired_is_never_computed() -> None:
    harness = slow()
    harness.send(submit(1, [1] * 10, deadline_ms=500), submit(2, [2] * 10))
    harness.state.kv_connected = True
    harness.now += 0.6
    harness.turn()
    assert harness.clients[1].ends[0].error.reason == "DEADLINE"
    asked = [list(r.token_ids) for message in harness.to_kv for r in message.reservations]
    assert asked == [[2] * 10]


def test_targets_change_the_order_and_fail_nothing() -> None:
    harness = slow(Limits(lookahead_tokens=8, infeasible="refuse", policy=fair()))
    harness.send(submit(1, [1] * 10), submit(2, [2] * 10, target_first_token_ms=1))
    harness.state.kv_connected = True
    harness.now += 5.0
    harness.turn()
    asked = [r.token_ids[0] for message in harness.to_kv for r in message.reservations]
    assert asked == [2, 1]
    harness.settle()
    assert not any(client.ends[0].error.reason for client in harness.clients.values())


def test_the_most_demanding_running_sequence_states_the_gap() -> None:
    harness = Harness(describe(max_sequences=4, blocks=200))
    executor = harness.state.executors[0]
    gaps = {1: 0, 2: 80, 3: 50, 4: 50}
    harness.send(*(submit(h, [h] * 5, 2000, ignore_eos=True, target_token_gap_ms=gap) for h, gap in gaps.items()))
    assert executor.gap_target is None
    place(harness)
    assert executor.gap_target == 0.05
    for handle, left in ((3, 0.05), (4, 0.08), (2, None)):
        harness.cancel(handle)
        assert executor.gap_target == left


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tenant_weight", -1.0),
        ("tenant_weight", float("nan")),
        ("tenant_weight", float("inf")),
        ("target_first_token_ms", -1),
        ("target_token_gap_ms", 2**40),
        ("deadline_ms", -1),
    ],
)
def test_bad_values_are_named(field: str, value: float) -> None:
    harness = slow()
    bad = submit(1, [1], 5)
    setattr(bad, field, value)
    requests.serve(harness.state, harness.gateway, scheduler_pb2.ServeRequest(submits=[bad]), harness.now)
    assert harness.gateway.outbox.ended[0].error.message.startswith(field)
