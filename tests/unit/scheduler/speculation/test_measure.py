"""What the controller learns of steps from results: as many verified drafts as the executor says."""

from __future__ import annotations

import pytest

from quire.v1 import executor_pb2
from services.scheduler.apply import apply
from services.scheduler.state import Limits
from tests.unit.scheduler.sim import Harness, submit
from tests.unit.scheduler.sim_executor import describe


def test_steps_are_those_of_all_sequences_whoever_the_message_is_about() -> None:
    """Urgent messages tell of few sequences, or none, but their timings are of all that was computed."""
    harness = Harness(describe(most_drafts=8))
    executor = harness.state.executors[0]
    known = executor.speculation
    assert known is not None
    for _ in range(200):
        timings = executor_pb2.StepTimings(
            step_count=3,
            compute_seconds=3 * 0.040 + 12 * 0.001,
            token_count=24 + 96,
            sampled_count=24,
            draft_count=96,
            draft_seconds=12 * 0.001,
            draft_step_count=3,
            draft_round_count=12,
        )
        number = executor.acknowledged_results + 1
        apply(
            harness.state,
            executor,
            executor_pb2.StepResults(epoch=executor.epoch, sequence_number=number, timings=timings),
            harness.now,
        )
    assert known.cost.step(40) == pytest.approx(0.040, rel=0.05)
    assert known.cost.draft(8) == pytest.approx(0.001, rel=0.05)


@pytest.mark.parametrize("is_behind", [True, False])
def test_steps_in_which_nothing_could_be_proposed_yet_say_nothing_of_drafts(is_behind: bool) -> None:
    harness = Harness(describe(most_drafts=8), limits=Limits(speculation=3))
    harness.sims[0].is_behind = is_behind
    harness.send(submit(1, [1, 2, 3], 41, ignore_eos=True))
    harness.settle()
    executor = harness.state.executors[0]
    assert executor.speculation is not None
    assert executor.counters.drafts.steps > 0
    counted = sum(depths.steps for depths in executor.speculation.acceptance.kinds)
    assert counted == (0 if is_behind else executor.counters.drafts.steps)
