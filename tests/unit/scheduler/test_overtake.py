"""Urgent work gets the place of less urgent work: when, whose, and no more than that."""

from __future__ import annotations

import random

import pytest

from services.scheduler.alarms import next_alarm
from services.scheduler.overtake import HEAD_START_SECONDS
from services.scheduler.policy import first_come
from services.scheduler.state import Executor, Limits
from tests.unit.scheduler.real_kv import RealKv
from tests.unit.scheduler.sim import Harness, assert_correct, submit
from tests.unit.scheduler.sim_executor import describe
from tests.unit.scheduler.test_batcher import place
from tests.unit.scheduler.test_random_load import assert_idle

TARGET_MS = 200


def full(count: int = 2, *, rate: float = 1e6, limits: Limits | None = None, **fields: object) -> Harness:
    """All places are taken, by requests 1 to `count`; the next one waits."""
    description = describe(max_sequences=count, blocks=400)
    description.prefill_tokens_per_second = rate
    harness = Harness(description, limits=limits)
    for handle in range(1, count + 1):
        harness.send(submit(handle, [handle] * 12, 60, ignore_eos=True, **fields))
        place(harness)
    harness.send(submit(5, [5] * 12, 4, ignore_eos=True))
    return harness


def urgent(harness: Harness, handle: int = 9, **fields: object) -> None:
    """One that has to start after what is nearly `TARGET_MS`, and that time passes."""
    wanted = {"priority": 5, "target_first_token_ms": TARGET_MS} | fields
    harness.send(submit(handle, [handle] * 10, 30, ignore_eos=True, **wanted))
    harness.now += TARGET_MS / 1000
    harness.turn()


def executor_of(harness: Harness) -> Executor:
    return harness.state.executors[0]


def running(harness: Harness) -> list[int]:
    """Handles of what runs or is about to."""
    asked = [a.sequence for a in harness.state.asked.values() if a.sequence is not None]
    return sorted(s.request.handle for s in (*executor_of(harness).running.values(), *asked))


def test_it_gets_the_place_of_the_cheapest_when_it_has_to_start_and_not_before() -> None:
    harness = full()
    harness.send(submit(9, [9] * 10, 30, priority=5, target_first_token_ms=TARGET_MS, ignore_eos=True))
    due = harness.state.request_ids["default", "r9"].must_start_at
    assert due == pytest.approx(harness.now + TARGET_MS / 1000, abs=1e-3)
    assert next_alarm(harness.state) == pytest.approx(due - HEAD_START_SECONDS)
    harness.now = due - HEAD_START_SECONDS - 0.001
    harness.turn()
    assert running(harness) == [1, 2]
    harness.now += 0.002
    harness.turn()
    assert running(harness) == [1, 9]
    (decision,) = harness.state.decisions.latest()
    assert (decision.what, decision.request_id) == ("preempted", "r2")
    assert decision.why.startswith(
        "request r9 of priority 5 has to start now; its priority is 0, its tenant was served"
    )
    harness.settle()
    for handle in (1, 2, 5, 9):
        assert_correct(harness, handle)
    assert executor_of(harness).counters.preemptions == 1
    assert_idle(harness)


def test_who_yielded_goes_on_before_who_never_ran_and_yields_no_more() -> None:
    harness = full()
    for handle in (9, 10, 11):
        urgent(harness, handle)
        place(harness)
    assert running(harness) == [9, 10]  # both yielded; of equal priority nobody does
    assert executor_of(harness).counters.preemptions == 2
    harness.cancel(9)
    harness.cancel(11)
    place(harness)
    assert running(harness) == [1, 10]
    urgent(harness, 12)
    assert running(harness) == [1, 10]
    harness.settle()
    for handle in (1, 2, 5, 10, 12):
        assert_correct(harness, handle)
    assert executor_of(harness).counters.preemptions == 2


def test_of_several_executors_it_takes_the_least_urgent_place() -> None:
    descriptions = [describe(executor_id=f"e{i}", max_sequences=2, blocks=400) for i in range(2)]
    harness = Harness(*descriptions)
    for handle, priority in enumerate((3, 3, 3, 1), start=1):
        harness.send(submit(handle, [handle] * 12, 60, ignore_eos=True, priority=priority))
        place(harness)
    urgent(harness)
    running = [s.request.handle for e in harness.state.executors for s in e.running.values()]
    assert sorted(running) == [1, 2, 3]


@pytest.mark.parametrize(
    ("case", "fields"),
    [
        ("nothing states a time", {"target_first_token_ms": 0}),
        ("not more urgent", {"priority": 0}),
        ("too late already", {"target_first_token_ms": 0, "deadline_ms": 205}),
        ("its time has not come", {"target_first_token_ms": 1000}),
    ],
)
def test_nobody_yields_without_need(case: str, fields: dict[str, object]) -> None:
    harness = full(rate=1e3)  # ten tokens take ten milliseconds
    urgent(harness, **fields)
    assert running(harness) == [1, 2], case
    assert executor_of(harness).counters.preemptions == 0


def test_the_only_one_that_runs_is_left_alone() -> None:
    harness = full(1)
    urgent(harness)
    assert running(harness) == [1]


def test_who_comes_first_is_not_overtaken_under_that_policy() -> None:
    harness = full(limits=Limits(lookahead_tokens=8, policy=first_come()))
    urgent(harness)
    assert running(harness) == [1, 2]
    assert next_alarm(harness.state) != harness.now


def test_whose_blocks_come_late_keeps_its_turn() -> None:
    """The kvmanager refuses at first, for the victim's blocks are not free before the executor has answered."""
    harness = full()
    urgent(harness)
    harness.restart_kv()  # as good: what was asked is asked again
    harness.turn()
    assert running(harness) == [1, 9]
    harness.settle()
    for handle in (1, 2, 5, 9):
        assert_correct(harness, handle)


@pytest.mark.parametrize("seed", range(6))
def test_answers_stay_the_same_however_often_others_overtake(seed: int) -> None:
    rng = random.Random(seed)
    descriptions = [describe(executor_id=f"e{i}", blocks=30, max_sequences=3) for i in range(2)]
    harness = Harness(*descriptions, limits=Limits(lookahead_tokens=4), seed=seed, kv=RealKv())
    for handle in range(1, 41):
        harness.send(
            submit(
                handle,
                [rng.randint(1, 999) for _ in range(rng.randint(1, 20))],
                rng.randint(1, 25),
                priority=rng.choice([0, 0, 2, 5]),
                choice_count=rng.choice([1, 1, 2]),
                target_first_token_ms=rng.choice([0, 1, 20, 60]),
            )
        )
        for _ in range(rng.randint(0, 12)):
            harness.step()
        if rng.random() < 0.1:
            harness.cancel(rng.choice(list(harness.gateway.requests) or [handle]))
    harness.settle()
    for handle in harness.clients:
        assert_correct(harness, handle)
    said = [decision.why for decision in harness.state.decisions.latest()]
    assert any("has to start now" in why for why in said)
    assert_idle(harness)
