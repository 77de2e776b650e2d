"""What people are told of the queues: reasons for waiting and for running."""

from __future__ import annotations

from quire.v1 import scheduler_status_pb2
from services.scheduler.aliases import parse_alias
from services.scheduler.decisions import KEPT
from services.scheduler.policy import static_batches
from services.scheduler.queue_status import ENTRIES, TENANTS, describe_decisions, describe_queues, describe_refusals
from services.scheduler.state import Limits
from tests.unit.scheduler.real_kv import RealKv
from tests.unit.scheduler.sim import Harness, submit
from tests.unit.scheduler.sim_executor import describe
from tests.unit.scheduler.test_batcher import place
from tests.unit.scheduler.test_preempt import computed, prompts


def status(harness: Harness) -> scheduler_status_pb2.QueueStatus:
    (queue,) = describe_queues(harness.state, harness.now)
    return queue


def reasons(harness: Harness) -> list[tuple[str, str]]:
    return [(one.request_id, one.reason) for one in status(harness).waiting]


def test_why_it_waits() -> None:
    """No room, another tenant's turn, its own tenant's others, a higher priority, a deadline that is out of reach."""
    description = describe(max_sequences=1, blocks=200)
    description.prefill_tokens_per_second = 100.0
    harness = Harness(description)
    harness.send(submit(1, [1] * 20, 50, ignore_eos=True, tenant="a"))
    place(harness)
    harness.send(
        submit(3, [3] * 30, tenant="b", priority=2),
        submit(4, [4] * 20, tenant="b", priority=2),
        submit(2, [2] * 20, tenant="a"),
        submit(5, [5] * 20, tenant="a", priority=2),
        submit(6, [6] * 20, tenant="c", priority=9, deadline_ms=2000, choice_count=2),
    )
    full = "t0 has no room: 1 of 1 sequences"
    harness.now += 1.9
    assert reasons(harness)[0] == ("r6", f"{full}; 1 more choices wait for its prompt")
    harness.state.models["m"].queue.peek(harness.now, 100.0)
    assert reasons(harness) == [
        ("r3", full),
        ("r5", f"{full}; its tenant was served 20 more than another"),
        ("r4", f"{full}; 1 of its tenant go first"),
        ("r2", f"{full}; priority 0 by now: those of priority 2 go first"),
        ("r6", f"{full}; cannot meet its deadline: goes last; 1 more choices wait for its prompt"),
    ]


def test_what_keeps_the_next_one_back() -> None:
    harness = Harness(describe(max_sequences=2, blocks=12), limits=Limits(lookahead_tokens=4))
    harness.send(submit(1, [1] * 30, 8, ignore_eos=True))
    assert reasons(harness) == [("r1", "the kvmanager was asked for its blocks")]
    place(harness)
    harness.send(submit(2, [2] * 30, 8, ignore_eos=True))
    place(harness)
    assert reasons(harness) == [("r2", "no KV blocks")]
    harness.state.kv_connected = False
    assert reasons(harness) == [("r2", "the kvmanager is gone")]
    harness.lose(0)
    assert ("r2", "no executor takes sequences of this model") in reasons(harness)


def test_a_static_batch_keeps_others_back() -> None:
    harness = Harness(describe(max_sequences=4), limits=Limits(lookahead_tokens=8, policy=static_batches()))
    harness.send(submit(1, [1] * 5, 50, ignore_eos=True))
    place(harness)
    harness.send(submit(2, [2] * 5))
    assert reasons(harness) == [("r2", "the batch on t0 has not ended")]
    assert status(harness).policy == "static"


def test_why_it_was_admitted() -> None:
    harness = Harness(describe(max_sequences=2, blocks=60), kv=RealKv())
    harness.send(submit(1, [1] * 20, 3, tenant="a", priority=3))
    place(harness)
    harness.now += 2.0
    (admission,) = status(harness).admissions
    assert (admission.request_id, admission.tenant, admission.target) == ("r1", "a", "t0")
    assert admission.reason == "priority 3 is the highest, and its tenant was served least: 0"
    assert admission.placement_reasons
    assert admission.age_seconds == 2.0


def test_tenants_and_their_shares() -> None:
    harness = Harness(describe(max_sequences=4, blocks=200))
    harness.send(submit(1, [1] * 20, 10, ignore_eos=True, tenant="a", tenant_weight=2.0))
    harness.send(submit(2, [2] * 40, 20, ignore_eos=True, tenant="b"))
    harness.settle()
    harness.send(*(submit(h, [h], 50, ignore_eos=True, tenant="c") for h in range(3, 9)))
    place(harness)
    c, b, a = status(harness).tenants
    assert (c.tenant, c.waiting_count, c.running_count, c.prompt_tokens) == ("c", 2, 4, 4)
    assert (b.tenant, b.prompt_tokens, b.output_tokens, b.waiting_count) == ("b", 40, 20, 0)
    assert (a.weight, a.virtual_time) == (2.0, 20.0)
    assert [round(t.share, 3) for t in (a, b, c)] == [round(n / 124, 3) for n in (40, 80, 4)]


def test_long_queues_are_cut_and_the_order_is_left_as_it_was() -> None:
    harness = Harness(describe(max_sequences=1))
    harness.state.kv_connected = False
    for handle in range(1, 300):
        harness.send(submit(handle, [1], tenant=f"t{handle % (2 * TENANTS)}"))
    queue = harness.state.models["m"].queue
    before = queue.peek(harness.now, 1e6)
    said = status(harness)
    assert (len(said.tenants), len(said.waiting), said.waiting_count) == (TENANTS, ENTRIES, 299)
    assert queue.peek(harness.now, 1e6) is before
    assert said.waiting[0].request_id == "r1"


def test_refusals_by_reason() -> None:
    harness = Harness(describe())
    harness.send(submit(1, []), submit(2, []))
    assert [(one.reason, one.count) for one in describe_refusals(harness.state)] == [("INVALID_FIELD", 2)]


def decided(harness: Harness) -> list[tuple[str, str, str]]:
    said = describe_decisions(harness.state, harness.now)
    return [(one.what, one.request_id, one.reason) for one in said]


def test_why_one_yields_whose_blocks_others_need() -> None:
    harness, executor, (first, _) = computed(*prompts({}, {"priority": -1, "tenant": "b"}))
    executor.starved[first.sequence_id] = first
    first.slots_held = first.projected_length
    harness.turn()
    ((what, request_id, reason),) = decided(harness)
    assert (what, request_id) == ("preempted", "r2")
    assert reason == (
        "t0 has run out of KV blocks; its priority is -1, its tenant was served 14, and 6 blocks come free, "
        "computed again in 12.0 ms"
    )
    harness.now += 3.0
    assert describe_decisions(harness.state, harness.now)[0].age_seconds == 3.0


def test_why_one_moves_off_an_executor_that_takes_no_more() -> None:
    harness = Harness(*(describe(executor_id=f"e{i}", blocks=200) for i in range(2)))
    harness.send(submit(1, [1] * 5, 50, ignore_eos=True))
    place(harness)
    (executor,) = {sequence.executor for sequence in harness.state.running.values()}
    assert executor is not None
    executor.retired = True
    harness.turn()
    ((what, request_id, reason),) = decided(harness)
    assert (what, request_id) == ("moved", "r1")
    assert reason.startswith(f"{executor.target} takes no more, and it would take 0.5 s to end there")


def test_why_a_request_was_refused_and_why_it_got_its_model() -> None:
    harness = Harness(describe(), limits=Limits(max_queued=2), aliases=(parse_alias("auto=m@priority=1..,m"),))
    harness.send(submit(1, [1], model="auto", priority=3))
    harness.now += 1.0
    harness.send(submit(2, [2], choice_count=3))
    (refused, routed) = decided(harness)
    assert refused[:2] == ("refused", "r2")
    assert refused[2].startswith("QUEUE_FULL: the queue is full: 1 sequences wait, 3 more would exceed the limit of 2")
    assert routed == ("routed", "r1", "m: 3 lies in priority=1..")


def test_refusals_by_the_thousand_hide_no_other_decision() -> None:
    harness = Harness(describe(), aliases=(parse_alias("auto=m@priority=1..,m"),))
    harness.send(submit(1, [1], model="auto"))
    harness.send(*(submit(handle, []) for handle in range(2, 102)))
    said = decided(harness)
    assert [what for what, _, _ in said].count("refused") == KEPT
    assert ("routed", "r1", "m: nothing speaks for one before it") in said
