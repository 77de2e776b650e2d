"""What is told of drafts: to people, and to Prometheus under vLLM's names."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest

from services.scheduler.metrics import SchedulerMetrics
from services.scheduler.speculation.status import describe_drafts
from services.scheduler.state import Limits
from tests.unit.scheduler.sim import Harness, submit
from tests.unit.scheduler.sim_executor import describe


def test_drafts_are_counted_by_position_and_limit() -> None:
    harness = Harness(describe(most_drafts=8), limits=Limits(speculation=3))
    harness.sims[0].draft_quality = 1.0
    harness.send(submit(1, [1, 2, 3], 41, ignore_eos=True))
    harness.settle()
    told = describe_drafts(harness.state, harness.state.executors[0])
    assert told is not None
    assert told.mode == "3"
    assert told.accepted_count == told.proposed_count == 30  # 1 of the prompt, then four in each step
    assert (told.step_count, told.steps_by_limit[3]) == (10, 10)
    assert list(told.accepted_by_position) == [10, 10, 10] + [0] * 13
    registry = CollectorRegistry()
    registry.register(SchedulerMetrics(harness.state))
    lines = generate_latest(registry).decode().splitlines()
    own = 'engine="0",model_name="m"'
    for line in (
        f"vllm:spec_decode_num_drafts_total{{{own}}} 10.0",
        f"vllm:spec_decode_num_draft_tokens_total{{{own}}} 30.0",
        f"vllm:spec_decode_num_accepted_tokens_total{{{own}}} 30.0",
        f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{own},position="2"}} 10.0',
        f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{own},position="3"}} 0.0',
        'quire_speculation_steps_total{engine="0",limit="3",model_name="m"} 10.0',
    ):
        assert line in lines
    (saved,) = (line.split()[-1] for line in lines if line.startswith("quire_speculation_saved_seconds{"))
    assert float(saved) == pytest.approx(30 * 0.01)  # steps of one token each; what drafts took was not told


def test_where_nothing_is_proposed_nothing_is_told() -> None:
    harness = Harness(describe())
    assert describe_drafts(harness.state, harness.state.executors[0]) is None


def test_off_is_said_and_kept() -> None:
    harness = Harness(describe(most_drafts=8), limits=Limits(speculation=0))
    harness.send(submit(1, [1, 2, 3], 20, ignore_eos=True))
    harness.settle()
    told = describe_drafts(harness.state, harness.state.executors[0])
    assert told is not None
    assert (told.mode, told.step_count) == ("off", 0)


def test_a_request_without_drafts_has_none_beside_one_with() -> None:
    harness = Harness(describe(most_drafts=8), limits=Limits(speculation=4))
    harness.sims[0].draft_quality = 1.0
    harness.send(
        submit(1, [1, 2, 3], 31, ignore_eos=True, speculation="off"),
        submit(2, [4, 5, 6], 31, ignore_eos=True, speculation="2"),
    )
    harness.settle()
    limits = harness.state.executors[0].counters.drafts.limits
    assert limits[2] == 10
    assert sum(limits) == 10
