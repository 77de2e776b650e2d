"""Who is next of those that wait."""

from __future__ import annotations

import random

import pytest

from quire.v1 import kvmanager_pb2
from services.scheduler.heap import SWEEP_FROM
from services.scheduler.order import PREFIX_TOKENS, SLOT_SECONDS
from services.scheduler.policy import fair, first_come, static_batches
from services.scheduler.queue import WaitingQueue
from services.scheduler.reserve import reserve, take
from services.scheduler.sequence import Phase, Sequence
from services.scheduler.state import Limits
from tests.unit.scheduler.sim import Harness, assert_correct, submit
from tests.unit.scheduler.sim_executor import describe
from tests.unit.scheduler.test_batcher import place


def waiting(limits: Limits | None = None) -> Harness:
    """All that is sent to it waits: the kvmanager is away."""
    harness = Harness(describe(max_sequences=1), limits=limits)
    harness.state.kv_connected = False
    return harness


def sent(*fields: dict[str, object], limits: Limits | None = None) -> tuple[Harness, list[Sequence]]:
    """Sequences that wait, of one request each."""
    harness = waiting(limits)
    harness.send(*(submit(handle, [1] * 10, **f) for handle, f in enumerate(fields, start=1)))
    return harness, [request.lead for request in harness.state.request_ids.values()]


def queue_of(harness: Harness) -> WaitingQueue:
    (model,) = harness.state.models.values()
    return model.queue


def drain(harness: Harness, now: float | None = None, rate: float = 1e6) -> list[Sequence]:
    """In order; what is taken out counts as served to its tenant."""
    queue, found = queue_of(harness), []
    while (sequence := queue.peek(harness.now if now is None else now, rate)) is not None:
        queue.pop(sequence)
        sequence.request.account.ask(sequence)
        found.append(sequence)
    return found


def test_preempted_then_priority_then_arrival() -> None:
    harness, (first, urgent, later, preempted) = sent({}, {"priority": 5}, {}, {})
    queue_of(harness).remove(preempted)
    preempted.preempted = True
    queue_of(harness).push(preempted)
    assert drain(harness) == [preempted, urgent, first, later]


def test_promoted_goes_before_all_of_its_priority_and_is_held_once() -> None:
    harness, (first, promoted, last, low) = sent({"priority": 1}, {"priority": 1}, {"priority": 1}, {})
    queue_of(harness).promote(promoted)
    assert drain(harness) == [promoted, first, last, low]
    queue_of(harness).push(first)
    queue_of(harness).push(promoted)  # it was not granted
    assert drain(harness) == [promoted, first]


def test_what_cannot_meet_its_deadline_comes_last() -> None:
    harness, (hopeless, feasible, free) = sent({"deadline_ms": 1000}, {"deadline_ms": 60_000}, {})
    assert drain(harness, rate=5.0) == [feasible, free, hopeless]  # ten tokens take two seconds


def test_ended_ones_are_skipped() -> None:
    harness, (_, other) = sent({}, {})
    harness.cancel(1)
    assert drain(harness) == [other]
    assert len(queue_of(harness)) == 0


def test_what_ended_is_not_held_for_ever() -> None:
    """Behind a head that waits, clients may come and give up without end."""
    harness = waiting(Limits(policy=fair(ageing_seconds=1e9)))
    harness.send(submit(1, [1], 5))
    (head,) = (request.lead for request in harness.state.request_ids.values())
    for handle in range(2, 2000):
        harness.now += SLOT_SECONDS
        harness.send(submit(handle, [1] * PREFIX_TOKENS, 5, deadline_ms=3_600_000))
        harness.cancel(handle)
    assert head.line is not None
    assert len(head.line.waiting) <= SWEEP_FROM + 1
    assert len(head.line._groups) <= SWEEP_FROM + 2
    assert len(harness.state.deadlines) <= SWEEP_FROM + 1
    assert drain(harness) == [head]


def test_a_low_priority_rises_while_it_waits_and_then_fairness_decides() -> None:
    harness = waiting(Limits(policy=fair(ageing_seconds=10.0)))
    harness.now = 1000.0
    harness.send(submit(1, [1], priority=-2, tenant="low"), submit(2, [1], priority=1, tenant="high"))
    low, high = (request.lead for request in harness.state.request_ids.values())
    high.request.account.output_tokens += 10  # was served more than the other
    queue = queue_of(harness)
    assert queue.peek(1029.9, 1e6) is high
    assert queue.peek(1030.0, 1e6) is low  # three periods later both count as of priority 1
    harness.now = 1030.0
    harness.send(submit(3, [1], priority=4, tenant="new"))
    assert queue.peek(1030.0, 1e6) is not low  # a higher priority waits now
    assert queue.reason(queue.peek(1030.0, 1e6) or low, 1030.0).startswith("priority 4 ")


def test_a_flood_of_high_priority_starves_nobody() -> None:
    harness = waiting(Limits(policy=fair(ageing_seconds=5.0)))
    harness.send(submit(1, [1], priority=0, tenant="low"))
    (low,) = (request.lead for request in harness.state.request_ids.values())
    queue = queue_of(harness)
    for handle in range(2, 60):
        harness.now += 1.0
        harness.send(submit(handle, [1] * 50, priority=10, tenant="flood"))
        first = queue.peek(harness.now, 1e6)
        assert first is not None
        if first is low:
            break
        queue.pop(first)
        first.request.account.ask(first)
    assert first is low
    assert harness.now - low.request.arrived_at <= 10 * 5.0 + 1.0


def test_a_newcomer_begins_where_the_last_one_chosen_was_even_if_nobody_waits() -> None:
    harness, (first,) = sent({"tenant": "a"})
    drain(harness)
    first.request.account.output_tokens += 500
    harness.send(submit(2, [1] * 10, tenant="a"))
    drain(harness)
    harness.send(submit(3, [1] * 10, tenant="b"))
    newcomer = harness.gateway.requests[3]
    assert newcomer.account.virtual_time == 10 + 500 * Limits().output_cost


def test_urgent_work_of_a_tenant_overtakes_its_own_and_not_that_of_others() -> None:
    harness, (slow, urgent, target) = sent({}, {"deadline_ms": 3000}, {"target_first_token_ms": 1000})
    harness.send(submit(9, [1] * 10, tenant="b"))
    drained = drain(harness)
    assert [s for s in drained if s.request.tenant != "b"] == [target, urgent, slow]
    assert drained[1].request.tenant == "b"


def test_a_far_deadline_is_no_disadvantage() -> None:
    """It may start late, but what arrives for ever behind it must not overtake it for ever."""
    harness = waiting()
    harness.send(submit(1, [1], deadline_ms=3_600_000))
    harness.now += SLOT_SECONDS
    harness.send(submit(2, [1]))
    assert [s.request.handle for s in drain(harness)] == [1, 2]


def test_common_beginnings_follow_each_other_within_a_moment_only() -> None:
    harness = waiting()
    a, b = [1] * 40, [2] * 40
    harness.send(submit(1, [*a, 3]), submit(2, [*b, 3]), submit(3, [*a, 4]), submit(4, [5] * 20), submit(5, [*b, 6]))
    harness.now += SLOT_SECONDS
    harness.send(submit(6, [*a, 7]))
    assert [s.request.handle for s in drain(harness)] == [1, 3, 2, 5, 4, 6]


def test_first_come_first_served_knows_nothing_else() -> None:
    harness = waiting(Limits(policy=first_come()))
    harness.send(submit(1, [1]), submit(2, [1], priority=9), submit(3, [1], tenant="b"), submit(4, [1], deadline_ms=99))
    harness.cancel(3)
    assert [s.request.handle for s in drain(harness)] == [1, 2, 4]


def test_static_batches_begin_when_the_last_one_has_ended() -> None:
    limits = Limits(policy=static_batches(), lookahead_tokens=8)
    harness = Harness(describe(max_sequences=2, blocks=200), limits=limits)
    executor = harness.state.executors[0]
    harness.send(*(submit(handle, [handle] * 5, 5 * handle, ignore_eos=True) for handle in range(1, 6)))
    batches: list[set[str]] = []
    for _ in range(3000):
        running = {sequence.request.request_id for sequence in executor.running.values()}
        if running and (not batches or not running <= batches[-1]):
            batches.append(running)
        if not harness.step():
            break
    assert batches == [{"r1", "r2"}, {"r3", "r4"}, {"r5"}]
    for handle in range(1, 6):
        assert_correct(harness, handle)


@pytest.mark.parametrize("seed", range(8))
def test_against_a_plain_list(seed: int) -> None:
    """Any mixture of tenants, weights, priorities and times, in which virtual times rise and fall."""
    rng, period = random.Random(seed), 4.0
    harness = waiting(Limits(policy=fair(period)))
    queue, plain, asked, handle = queue_of(harness), list[Sequence](), list[Sequence](), 0
    for _ in range(400):
        harness.now += rng.choice([0.0, 0.0, 0.1, 2.0, 9.0]) * rng.random()
        event = rng.random()
        if event < 0.45:
            handle += 1
            tenant = rng.choice("aabcd")
            fields = {"priority": rng.choice([0, 0, 0, 1, 5]), "tenant_weight": {"a": 1.0, "b": 2.5}.get(tenant, 0.0)}
            target = rng.choice([0, 0, 500, 5000])
            harness.send(
                submit(handle, [1] * rng.randint(1, 30), tenant=tenant, target_first_token_ms=target, **fields)
            )
            plain.append(next(reversed(harness.state.request_ids.values())).lead)
        elif event < 0.55 and plain:
            gone = plain.pop(rng.randrange(len(plain)))
            harness.cancel(gone.request.handle)
        elif event < 0.65 and plain:
            rng.choice(plain).request.account.output_tokens += rng.randint(1, 30)
        elif event < 0.8 and asked:
            answered = asked.pop(rng.randrange(len(asked)))
            if rng.random() < 0.3:
                answered.request.account.give_back(answered)
                answered.move(Phase.WAITING)
                queue.push(answered)
                plain.append(answered)
            else:
                answered.request.account.grant(answered, rng.randint(0, len(answered.token_ids) - 1))
        else:
            _check_choice(queue, plain, harness.now, period)
            sequence = queue.peek(harness.now, 1e6)
            if sequence is None:
                continue
            queue.pop(sequence)
            sequence.move(Phase.RESERVING)
            sequence.request.account.ask(sequence)
            plain.remove(sequence)
            asked.append(sequence)
    assert len(queue) == len(plain)
    assert [s for s, _ in queue.upcoming(1, harness.now)][:1] == [queue.peek(harness.now, 1e6)][: len(plain)]


def _check_choice(queue: WaitingQueue, plain: list[Sequence], now: float, period: float) -> None:
    sequence = queue.peek(now, 1e6)
    if not plain:
        assert sequence is None
        return
    highest = max(s.request.priority for s in plain)
    best = [s for s in plain if s.request.priority + now // period - s.request.arrived_at // period >= highest]
    assert sequence in best
    least = min(s.request.account.virtual_time for s in best)
    assert sequence.request.account.virtual_time == least
    own = [s.request for s in best if s.request.account is sequence.request.account]
    assert sequence.request is min(own, key=lambda r: (r.start_by // SLOT_SECONDS, r.arrival))


def test_starved_sequences_ask_again_oldest_first_when_blocks_return() -> None:
    harness = Harness(describe(blocks=12, max_sequences=3), limits=Limits(lookahead_tokens=4))
    state, executor = harness.state, harness.state.executors[0]
    harness.send(*(submit(h, [h] * 8, 40, ignore_eos=True) for h in (1, 2, 3)))
    for _ in range(2000):
        if len(executor.starved) == 2:
            break
        harness.step()
    assert len(executor.starved) == 2
    stays = sorted(executor.starved)
    state.releases, before = [], state.releases
    state.extends = []
    executor.has_space = True
    (message,) = reserve(state, harness.now)
    assert list(message.extend_sequence_ids) == stays
    assert not message.reservations
    state.releases = before


def test_refused_newcomer_asks_again_only_when_something_changed() -> None:
    """No polling: a refusal is followed by silence until blocks come back."""
    harness = Harness(describe(blocks=12))
    harness.send(submit(1, [1] * 30, 8, ignore_eos=True))
    place(harness)
    harness.send(submit(2, [2] * 30, 8, ignore_eos=True))
    place(harness)
    assert harness.kv.refusals == 1
    for _ in range(20):
        harness.turn()
    assert not harness.to_kv
    take(harness.state, harness.kv.handle(kvmanager_pb2.ReserveRequest()), harness.now)  # the same space again
    harness.turn()
    assert not harness.to_kv
    harness.settle()
    assert harness.kv.refusals == 1
    assert all(client.done for client in harness.clients.values())
