"""Who is next, and who yields."""

from __future__ import annotations

from quire.v1 import kvmanager_pb2
from services.scheduler.heap import SWEEP_FROM
from services.scheduler.preempt import choose_victim
from services.scheduler.queue import WaitingQueue
from services.scheduler.reserve import reserve, take
from services.scheduler.sequence import Phase, Sequence
from services.scheduler.state import Limits
from tests.unit.scheduler.sim import Harness, submit
from tests.unit.scheduler.sim_executor import describe
from tests.unit.scheduler.test_batcher import place


def sequences(*fields: dict[str, int]) -> list[Sequence]:
    """Waiting sequences of one request each; none is ever placed."""
    harness = Harness(describe(max_sequences=1))
    harness.state.kv_connected = False
    harness.send(*(submit(handle, [1] * 10, **f) for handle, f in enumerate(fields, start=1)))
    return [request.lead for request in harness.state.request_ids.values()]


def drain(queue: WaitingQueue, now: float = 0.0, rate: float = 1e6) -> list[Sequence]:
    found = []
    while (sequence := queue.peek(now, rate)) is not None:
        queue.pop(sequence)
        found.append(sequence)
    return found


def test_preempted_then_priority_then_arrival() -> None:
    first, urgent, later, preempted = made = sequences({}, {"priority": 5}, {}, {})
    preempted.preempted = True
    queue = WaitingQueue()
    for sequence in reversed(made):
        queue.push(sequence)
    assert drain(queue) == [preempted, urgent, first, later]


def test_what_cannot_meet_its_deadline_comes_last() -> None:
    hopeless, feasible, free = made = sequences({"deadline_ms": 1000}, {"deadline_ms": 60_000}, {})
    queue = WaitingQueue()
    for sequence in made:
        queue.push(sequence)
    assert drain(queue, now=100.0, rate=5.0) == [feasible, free, hopeless]  # ten tokens take two seconds


def test_ended_ones_are_skipped() -> None:
    ended, other = made = sequences({}, {})
    queue = WaitingQueue()
    for sequence in made:
        queue.push(sequence)
    ended.phase = Phase.ENDED
    assert drain(queue) == [other]


def test_what_ended_is_not_held_for_ever() -> None:
    """Behind a head that waits, clients may come and give up without end."""
    harness = Harness(describe(max_sequences=1))
    harness.state.kv_connected = False
    harness.send(submit(1, [1], 5))
    for handle in range(2, 2000):
        harness.send(submit(handle, [1], 5, deadline_ms=3_600_000))
        harness.cancel(handle)
    [first] = harness.state.models.values()
    assert len(first.queue) <= SWEEP_FROM + 1
    assert len(harness.state.deadlines) <= SWEEP_FROM + 1
    assert first.queue.peek(0.0, 1e6) is harness.state.request_ids["default", "r1"].lead


def test_victim_is_held_or_least_urgent_or_newest_and_never_the_only_one() -> None:
    urgent, old, new = sequences({"priority": 5}, {}, {})
    assert choose_victim([urgent, old, new]) is new
    assert choose_victim([urgent, old]) is old
    urgent.request.held = True
    assert choose_victim([urgent, old, new]) is urgent
    assert choose_victim([new]) is None


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
