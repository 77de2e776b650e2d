"""Executors come, drain, fall silent and go at run time: streams go on, with every token once."""

from __future__ import annotations

import random
import unittest.mock

import pytest

from quire.v1 import types_pb2
from services.scheduler import drain, epochs
from services.scheduler.drain import seconds_left, seconds_to_repeat
from services.scheduler.state import Limits
from tests.unit.scheduler.real_kv import RealKv
from tests.unit.scheduler.sim import Harness, assert_correct, submit
from tests.unit.scheduler.sim_executor import describe
from tests.unit.scheduler.test_random_load import assert_idle, random_submit


def one(index: int, **fields: object) -> types_pb2.ExecutorDescription:
    return describe(executor_id=f"e{index}", **fields)


def load(harness: Harness, count: int, tokens: int = 30) -> range:
    """So many requests, under way."""
    handles = range(1, count + 1)
    harness.send(*(submit(h, [h] * 9, tokens, ignore_eos=True) for h in handles))
    while not all(harness.clients[h].outputs[0] for h in handles):
        assert harness.step()
    return handles


def end(harness: Harness, handles: range) -> None:
    harness.settle()
    for handle in handles:
        assert_correct(harness, handle)
    assert_idle(harness)


def test_what_runs_on_a_draining_executor_goes_on_elsewhere_at_once() -> None:
    harness = Harness(one(0), one(1))
    handles = load(harness, 6)
    leaving, staying = harness.state.executors
    moved = len(leaving.running)
    assert moved
    epochs.executor_ending(leaving, 30.0, harness.now)
    harness.turn()
    assert not leaving.running
    harness.settle()
    assert len(staying.running) == 0
    end(harness, handles)
    assert staying.counters.output_tokens > leaving.counters.output_tokens


def test_nothing_is_placed_on_a_draining_executor_that_cannot_give_its_own_away() -> None:
    """The only one: what runs there ends there, what comes waits for the next."""
    harness = Harness(one(0))
    handles = load(harness, 3)
    executor = harness.state.executors[0]
    epochs.executor_ending(executor, 30.0, harness.now)
    harness.send(submit(9, [9], 5, ignore_eos=True))
    harness.settle()
    assert harness.clients[9].outputs[0] == []
    assert not executor.running
    for handle in handles:
        assert_correct(harness, handle)
    harness.lose(0)
    harness.turn()
    harness.open(0)
    harness.turn()
    end(harness, range(1, 4))
    assert_correct(harness, 9)


def test_a_reservation_under_way_is_not_taken_to_a_draining_executor() -> None:
    harness = Harness(one(0))
    harness.send(submit(1, [1] * 5, 5))
    executor = harness.state.executors[0]
    executor.retired = True
    harness.settle()
    assert harness.clients[1].outputs[0] == []
    assert not executor.running
    epochs.executor_used_again(harness.state, executor)
    harness.turn()
    end(harness, range(1, 2))


def test_what_drains_empty_asks_nobody_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """It drains until its process ends, through any number of turns."""
    harness = Harness(one(0), one(1))
    harness.executor(0).retired = True
    rooms = unittest.mock.Mock(return_value=[])
    monkeypatch.setattr(drain, "_rooms", rooms)
    handles = load(harness, 3)
    end(harness, handles)
    assert not rooms.called


def test_moves_wait_for_room_elsewhere() -> None:
    """A stream never stands still for a drain: what nobody else has room for stays where it runs."""
    harness = Harness(one(0, max_sequences=4), one(1, max_sequences=4))
    handles = load(harness, 8, tokens=40)
    leaving = harness.state.executors[0]
    running = len(leaving.running)
    epochs.executor_ending(leaving, 30.0, harness.now)
    harness.turn()
    assert len(leaving.running) == running
    end(harness, handles)


@pytest.mark.parametrize(
    ("step_seconds", "ends_in", "stays"), [(0.001, 30.0, True), (1.0, 30.0, False), (0.001, 0.0, False)]
)
def test_a_sequence_stays_where_its_rest_is_sooner_done(step_seconds: float, ends_in: float, stays: bool) -> None:
    """Against computing its tokens again elsewhere, and against the time until the executor ends."""
    descriptions = [one(0, blocks=400), one(1, blocks=400)]
    for description in descriptions:
        description.prefill_tokens_per_second = 1000.0
    harness = Harness(*descriptions)
    harness.send(submit(1, [5] * 600, 8, ignore_eos=True))
    while len(harness.clients[1].outputs[0]) < 2:
        assert harness.step()
    leaving = next(e for e in harness.state.executors if e.running)
    other = next(e for e in harness.state.executors if not e.running)
    (sequence,) = leaving.running.values()
    leaving.step_seconds = step_seconds
    assert (seconds_left(leaving, sequence) < seconds_to_repeat(sequence, other)) == (step_seconds < 0.01)
    epochs.executor_ending(leaving, ends_in, harness.now)
    harness.turn()
    assert bool(leaving.running) == stays
    end(harness, range(1, 2))


def test_one_that_joins_takes_load() -> None:
    harness = Harness(one(0, max_sequences=2))
    handles = range(1, 9)
    harness.send(*(submit(h, [h] * 9, 30, ignore_eos=True) for h in handles))
    index = harness.join(one(1, max_sequences=2))
    end(harness, handles)
    assert harness.executor(index).counters.output_tokens > 0


def test_what_runs_on_a_removed_executor_goes_on_elsewhere_and_its_number_is_not_used_again() -> None:
    harness = Harness(one(0), one(1))
    handles = load(harness, 6)
    harness.remove(0)
    assert [e.index for e in harness.state.executors] == [1]
    index = harness.join(one(2))
    assert index == 2
    end(harness, handles)


def test_answers_that_name_a_removed_executor_place_nothing_there() -> None:
    harness = Harness(one(0))
    harness.send(submit(1, [1] * 5, 5))  # asked, with the executor that goes now
    harness.remove(0)
    harness.settle()
    assert harness.clients[1].outputs[0] == []
    harness.join(one(1))
    end(harness, range(1, 2))


def test_a_frozen_executors_sequences_resume_elsewhere() -> None:
    """K1: it neither computes nor ends; after `stall_seconds` its stream is given up."""
    harness = Harness(one(0), one(1), limits=Limits(lookahead_tokens=8, stall_seconds=5.0))
    handles = load(harness, 6)
    frozen, sound = harness.state.executors
    assert frozen.running
    assert sound.running
    harness.sims[0].run = lambda: None  # type: ignore[method-assign]
    harness.results[0].clear()
    while sound.running:
        harness.step()
    harness.now += 4.0
    harness.turn()
    assert frozen.stream_failure == ""
    assert frozen.slowness.factor > 3
    harness.now += 2.0
    harness.turn()
    assert frozen.stream_failure == "no result for 5 s"
    harness.lose(0)  # as the link does then; what answers again would open a new epoch
    harness.turn()
    harness.settle()
    for handle in handles:
        assert_correct(harness, handle)


@pytest.mark.parametrize("seed", range(6))
def test_executors_come_and_go_under_load(seed: int) -> None:
    """Joins, drains, ends and removals between all that else can happen, over the real kvmanager's core."""
    rng = random.Random(seed)
    harness = Harness(one(0, blocks=40, max_sequences=5), limits=Limits(lookahead_tokens=8), seed=seed, kv=RealKv())
    for handle in range(1, 61):
        harness.send(random_submit(rng, handle))
        for _ in range(rng.randint(0, 25)):
            harness.step()
        present = harness.state.executors
        event, victim = rng.random(), rng.choice(present)
        if event < 0.08:
            harness.join(one(len(harness.sims), blocks=40, max_sequences=5))
        elif event < 0.16 and victim.ends_at is None:
            epochs.executor_ending(victim, rng.choice([0.0, 1.0, 60.0]), harness.now)
            harness.turn()
        elif event < 0.22:
            if victim.retired:
                epochs.executor_used_again(harness.state, victim)
            else:
                victim.retired = True
            harness.turn()
        elif event < 0.28 and len(present) > 1:
            harness.remove(victim.index)
        elif event < 0.36 and victim.ends_at is not None:  # its process ended, and another one begins
            harness.lose(victim.index)
            harness.turn()
            harness.open(victim.index)
            harness.turn()
        elif event < 0.40:
            harness.restart_kv()
            harness.turn()
    for executor in harness.state.executors:
        epochs.executor_used_again(harness.state, executor)
    harness.join(one(len(harness.sims), blocks=40, max_sequences=5))
    harness.settle()
    for handle, client in harness.clients.items():
        assert client.done, f"request {handle} has not ended"
        assert_correct(harness, handle)
    state = harness.state
    assert not state.request_ids
    assert not any(e.running or e.leaving or e.asked_count for e in state.executors)
    assert harness.kv.manager.sequence_count == 0  # type: ignore[union-attr]
