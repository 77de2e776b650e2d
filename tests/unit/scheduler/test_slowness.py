"""How slow an executor is beside its peers, and what that does to where sequences go."""

from __future__ import annotations

import pytest

from quire.v1 import executor_pb2
from services.scheduler.slowness import (
    FAR_BEYOND,
    KEPT_SECONDS,
    SOUND,
    Pace,
    compare,
    median,
    note,
    of_silence,
    of_steps,
)
from services.scheduler.state import Executor
from tests.unit.scheduler.sim import Harness, submit
from tests.unit.scheduler.sim_executor import describe


def pace(seconds: float, rows: float = 4.0, at: float = 0.0) -> Pace:
    return Pace(step_seconds=seconds, rows=rows, measured_at=at)


def results(steps: int, seconds: float, tokens: int, sampled: int) -> executor_pb2.StepResults:
    return executor_pb2.StepResults(
        timings=executor_pb2.StepTimings(
            step_count=steps, compute_seconds=seconds, token_count=tokens, sampled_count=sampled
        ),
    )


def test_the_usual_pace_is_that_of_the_median() -> None:
    assert median([pace(0.01)]) is None
    assert median([Pace(), pace(0.01)]) is None
    assert median([pace(0.05), pace(0.01)]) == pace(0.01)
    assert median([pace(9.0), pace(0.02), pace(0.01), pace(0.03)]) == pace(0.02)


def test_far_longer_steps_count_and_small_differences_do_not() -> None:
    slow = of_steps(pace(0.05), pace(0.01), 0.0)
    assert slow.factor == pytest.approx(5.0)
    assert slow.reason == "a step of 4 sequences takes 50.0 ms, 5.0 times as long as those of its peers"
    assert of_steps(pace(0.01 * (FAR_BEYOND - 0.1)), pace(0.01), 0.0) == SOUND


def test_whoever_runs_more_may_take_longer() -> None:
    assert of_steps(pace(0.05, rows=16), pace(0.01, rows=2), 0.0) == SOUND
    assert of_steps(pace(0.05, rows=2), pace(0.01, rows=16), 0.0).factor == pytest.approx(5.0)


def test_what_was_measured_long_ago_says_nothing() -> None:
    assert of_steps(pace(0.05), pace(0.01), KEPT_SECONDS + 0.1) == SOUND
    assert of_steps(Pace(), pace(0.01), 0.0) == SOUND


def test_silence_counts_in_units_of_what_an_answer_may_take() -> None:
    assert of_silence(2.9, 0.02) == SOUND
    assert of_silence(40.0, 20.0) == SOUND
    assert of_silence(6.0, 0.02).factor == pytest.approx(6.0)
    assert of_silence(60.0, 15.0).reason == "no results for 60.0 s, where 15.0 s are expected"


def test_only_steps_without_prompts_are_measured() -> None:
    executor = Executor(0, "t")
    note(executor, results(steps=2, seconds=9.0, tokens=300, sampled=2), 1.0)
    assert executor.pace == Pace(heard_at=1.0)
    note(executor, results(steps=2, seconds=0.02, tokens=8, sampled=8), 2.0)
    assert executor.pace == Pace(step_seconds=0.01, rows=4.0, measured_at=2.0, heard_at=2.0)
    note(executor, results(steps=1, seconds=0.06, tokens=4, sampled=4), 3.0)
    assert executor.pace.step_seconds == pytest.approx(0.02)


def test_a_sick_machine_gets_less_and_is_tried_again() -> None:
    harness = Harness(*(describe(executor_id=f"e{i}") for i in range(3)))
    harness.send(*(submit(h, [h] * 9, 40, ignore_eos=True) for h in range(1, 10)))
    while not all(harness.clients[h].outputs[0] for h in range(1, 10)):
        assert harness.step()
    sick, *sound = harness.state.executors
    for executor in sound:
        executor.pace = pace(0.01, at=harness.now)
    sick.pace = pace(0.10, at=harness.now)
    harness.now += 1.0
    harness.send(submit(20, [2] * 30, 5))
    loads = harness.to_kv[-1].loads
    stated = dict(zip(loads.executor_ids, loads.slownesses, strict=True))
    assert stated["e0"] == pytest.approx(10.0)
    assert stated["e1"] == stated["e2"] == 1.0
    compare(harness.state, harness.now + KEPT_SECONDS + 1.0)
    assert not sick.slowness.reason.startswith("a step")
