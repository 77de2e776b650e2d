"""Simulated worlds: times that can be worked out by hand, equal runs, and what policies and limits do."""

from __future__ import annotations

from typing import Any

import pytest

from quire.simulation.load import Lengths, Tenant, arriving
from quire.simulation.network import Link
from quire.simulation.policies import policy
from quire.simulation.service import Latencies
from quire.simulation.world import Stalled, World
from services.executor.cost_model import CostModel
from services.scheduler.settings import SchedulerSettings
from tests.simulation.scenarios import SOLO, equal_requests, load, run, scenario

STEP = 10.0  # milliseconds


def test_a_request_alone_takes_its_steps() -> None:
    """One step for the prompt, which gives the first token, and one for each further token."""
    report = run(scenario(load((0.0, 100, 5)))).report
    assert report["steps"] == 5
    assert report["ttft_ms"]["p50"] == pytest.approx(STEP)
    assert report["e2e_ms"]["p50"] == pytest.approx(5 * STEP)
    assert report["itl_ms"]["mean"] == pytest.approx(STEP)
    assert report["output_tok_s"] == pytest.approx(5 / 0.050)
    assert report["utilization"] == pytest.approx(1.0)


def test_a_long_prompt_takes_a_step_for_each_chunk() -> None:
    report = run(scenario(load((0.0, 600, 1)))).report  # 256 tokens a step
    assert report["ttft_ms"]["p50"] == pytest.approx(3 * STEP)


def test_parts_of_a_step_cost_what_the_model_says() -> None:
    cost = {"step": 0.0, "decode_row": 0.002, "context_token": 1e-5, "prompt_token": 1e-4, "prompt_pair": 1e-6}
    report = run(scenario(load((0.0, 100, 3)), machine={"cost": CostModel(**cost)})).report
    prompt = 100 * 1e-4 + 5050 * 1e-6
    decode = 2 * 0.002 + (101 + 102) * 1e-5
    assert report["ttft_ms"]["p50"] == pytest.approx(1000 * prompt)
    assert report["e2e_ms"]["p50"] == pytest.approx(1000 * (prompt + decode))


def test_messages_take_their_time() -> None:
    """Of six links: to the scheduler, to the kvmanager and back, to the executor; after the step all the way back."""
    report = run(scenario(load((1.0, 100, 1)), latencies=Latencies(link=0.001, message=0.0))).report
    assert report["ttft_ms"]["p50"] == pytest.approx(STEP + 6)
    served = run(scenario(load((1.0, 100, 1)), latencies=Latencies(link=0.0, message=0.001))).report
    # Of the gateway, the scheduler, the kvmanager, the scheduler; and after the step of the scheduler and the gateway.
    assert served["ttft_ms"]["p50"] == pytest.approx(STEP + 6)


def test_neighbours_share_steps() -> None:
    """Of the second one's first step only what is left when it comes must be waited for."""
    report = run(scenario(load((0.0, 10, 20), (0.015, 10, 20)))).report
    assert report["steps"] == 22
    assert report["ttft_ms"]["p50"] == pytest.approx(STEP, rel=0.01)
    assert report["ttft_ms"]["p99"] == pytest.approx(STEP + 5)


def test_a_closed_loop_keeps_so_many_requests_running() -> None:
    report = run(scenario(equal_requests(16, 10, 10, concurrency=4))).report
    assert report["requests"] == 16
    assert report["steps"] == 40
    assert report["rows_per_step"] == pytest.approx(4.0)


def test_load_goes_to_all_executors() -> None:
    world = World(scenario(equal_requests(64, 10, 20, concurrency=8), executor_count=4), _policy("fair"))
    world.run()
    steps = [executor.work.steps for executor in world.executors]
    assert min(steps) > 0
    assert max(executor.work.rows for executor in world.executors) <= 64 * 20 / 4 * 1.5


def test_equal_seeds_have_equal_reports_and_others_have_not() -> None:
    def found(seed: int) -> dict[str, Any]:
        asked = arriving(Lengths.fixed(100, 20), 60, 20.0, 2.0, SOLO, seed)
        return run(scenario(asked, executor_count=3, latencies=Latencies())).report

    assert found(1) == found(1)
    assert found(1) != found(2)


def test_sequences_yield_where_blocks_run_out_and_all_ends_well() -> None:
    asked = equal_requests(12, 60, 100, concurrency=6)
    few = scenario(asked, machine={"block_count": 32})  # three whole sequences, of ten blocks each
    report = run(few, lookahead_tokens=16).report
    assert report["preemptions"] > 0
    assert report["recomputed_tokens"] > 0
    assert not report["failures"]
    assert report["requests"] == 12
    careful = run(few, "no-preemption").report
    assert careful["preemptions"] == careful["recomputed_tokens"] == 0
    assert careful["kv_waste"] > report["kv_waste"]


def test_a_static_batch_ends_with_its_longest_answer() -> None:
    """Two batches of two: rows of the short answers run as long as those of the long ones."""
    asked = load((0.0, 10, 5), (0.0, 10, 50), (0.0, 10, 5), (0.0, 10, 50))
    two = scenario(asked, machine={"max_sequences": 2})
    static, fair = (run(two, name).report for name in ("static", "fair"))
    assert static["steps"] == 2 * 50
    assert static["duration_s"] == pytest.approx(1.0)
    assert static["ttft_ms"]["p99"] == pytest.approx(510.0)
    assert fair["steps"] == 5 + 1 + 5 + 1 + 50  # a newcomer misses the step under way when it comes
    cost = {"step": 0.001, "decode_row": 0.001, "context_token": 0.0, "prompt_token": 0.0, "prompt_pair": 0.0}
    padded = run(scenario(asked, machine={"max_sequences": 2, "cost": CostModel(**cost)}), "static").report
    assert padded["duration_s"] == pytest.approx(2 * (0.001 + 49 * 0.003))


def test_first_come_first_served_knows_no_priority() -> None:
    tenants = (Tenant("low", priority=0), Tenant("high", priority=5))
    asked = load((0.0, 10, 50), (0.05, 10, 50), (0.1, 10, 50), tenants=(0, 0, 1))
    one = scenario(asked, tenants=tenants, machine={"max_sequences": 1})
    first = {name: run(one, name).report["tenants"][1]["ttft_ms"]["p50"] for name in ("fair", "fcfs")}
    assert first["fair"] == pytest.approx(500 - 100 + STEP, abs=STEP)
    assert first["fcfs"] == pytest.approx(1000 - 100 + STEP, abs=STEP)


def test_what_can_never_fit_fails_and_the_rest_is_served() -> None:
    report = run(scenario(load((0.0, 1000, 10), (0.0, 10, 10)), machine={"block_count": 32})).report
    assert report["failures"] == {"NEVER_FITS": 1}
    assert report["requests"] == 2


def test_shared_prefixes_are_found() -> None:
    lengths = Lengths(*_columns([320, 320], [5, 5]), [(7, 8), (7, 9)], block_tokens=160)
    asked = arriving(lengths, 2, 1.0, 0.0, SOLO, 0)
    both = sorted({int(row) for row in asked.rows})
    report = run(scenario(asked)).report
    assert report["cached_share"] == pytest.approx((160 if len(both) == 2 else 304) / 640)


def test_goodput_counts_what_kept_to_targets() -> None:
    from quire.simulation.measures import Targets

    two = load((0.0, 10, 5), (0.0, 600, 5))
    report = run(scenario(two, targets=Targets(first_token=0.015))).report
    assert report["good_share"] == pytest.approx(0.5)


def test_a_world_in_which_nothing_happens_any_more_says_so() -> None:
    def lose_plans(link: Link[Any], message: Any) -> tuple[float, ...]:
        return () if link.name == "scheduler to executor 0" else (0.0,)

    world = World(scenario(load((0.0, 10, 5))), _policy("fair", stall_seconds=1e9), fate=lose_plans)
    with pytest.raises(Stalled, match="1 requests never end"):
        world.run()


def test_tenants_are_told_apart() -> None:
    tenants = (Tenant("a"), Tenant("b"))
    asked = load((0.0, 10, 5), (0.0, 10, 7), (0.0, 10, 9), tenants=(0, 1, 1))
    report = run(scenario(asked, tenants=tenants)).report
    assert [(t["tenant"], t["requests"]) for t in report["tenants"]] == [("a", 1), ("b", 2)]


def test_reading_far_memory_costs_more() -> None:
    cost = CostModel(step=0.001, decode_row=0.0, context_token=1e-4, prompt_token=0.0, prompt_pair=0.0)
    asked = equal_requests(8, 100, 50, concurrency=8)
    near = run(scenario(asked, machine={"cost": cost})).report
    both = run(scenario(asked, machine={"cost": cost, "block_count": 100}, node_count=2)).report
    assert both["duration_s"] > near["duration_s"]


def _policy(name: str, **settings: Any) -> Any:
    return policy(name, SchedulerSettings.model_validate(settings))


def _columns(*columns: list[int]) -> list[Any]:
    import numpy as np

    return [np.array(column, np.int32) for column in columns]
