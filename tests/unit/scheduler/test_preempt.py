"""Who yields its blocks, and whether its content goes to a lower tier or is computed again."""

from __future__ import annotations

from collections import deque

import pytest

from quire.v1 import kvmanager_pb2, scheduler_pb2, types_pb2
from services.scheduler.pace import StepTime
from services.scheduler.preempt import COMING_SECONDS, choose_victim, is_stuck
from services.scheduler.reserve import take
from services.scheduler.sequence import Sequence
from services.scheduler.state import Executor, Limits
from tests.unit.scheduler.real_kv import RealKv
from tests.unit.scheduler.sim import Harness, assert_correct, submit
from tests.unit.scheduler.sim_executor import describe
from tests.unit.scheduler.test_batcher import answer, place

LOOKAHEAD = 8


def computed(*submits: scheduler_pb2.Submit, disk_blocks: int = 0) -> tuple[Harness, Executor, list[Sequence]]:
    """These run, their prompts computed and one token each of the output known."""
    harness = Harness(
        describe(blocks=1000, max_sequences=64, max_step_tokens=512, disk_blocks=disk_blocks),
        limits=Limits(lookahead_tokens=LOOKAHEAD),
    )
    executor = harness.state.executors[0]
    for number, one in enumerate(submits, start=1):
        harness.send(one)
        place(harness)
        answer(harness, executor, number, [7], len(one.prompt_token_ids), 1)
    executor.step_time = StepTime(base=0.01, row=0.001, token=0.001)
    return harness, executor, list(executor.running.values())


def prompts(*fields: dict[str, object]) -> list[scheduler_pb2.Submit]:
    return [submit(handle, [handle] * 12, 40, **one) for handle, one in enumerate(fields, start=1)]  # type: ignore[arg-type]


def victim(executor: Executor) -> Sequence | None:
    found = choose_victim(executor)
    return found[0] if found is not None else None


def test_held_then_least_urgent_then_newest_and_never_the_only_one() -> None:
    harness, executor, (urgent, old, new) = computed(*prompts({"priority": 5}, {}, {}))
    assert victim(executor) is new
    new.request.priority = 9
    assert victim(executor) is old
    harness.send(holds=[scheduler_pb2.Hold(handle=1, held=True)])
    assert victim(executor) is urgent
    harness.cancel(2)
    harness.cancel(3)
    assert victim(executor) is None


def test_of_one_priority_the_tenant_yields_that_was_served_most() -> None:
    _, executor, (flood, newer, light) = computed(*prompts({"tenant": "a"}, {"tenant": "a"}, {"tenant": "b"}))
    flood.request.account.output_tokens += 10_000
    assert victim(executor) is newer
    light.request.account.output_tokens += 30_000
    assert victim(executor) is light
    flood.request.priority = -1
    assert victim(executor) is flood


def test_one_that_computed_little_yields_before_a_newer_one_whose_blocks_are_full() -> None:
    _, executor, (first, _) = computed(*prompts({}, {}))
    first.computed_length = 4  # as one whose long prompt has just begun
    assert victim(executor) is first


def test_shared_blocks_neither_come_free_nor_are_lost() -> None:
    _, executor, (first, second, _) = computed(*prompts({}, {}, {}))
    assert first.stay is not None
    assert second.stay is not None
    second.stay.blocks[0][:3] = first.stay.blocks[0][:3]
    found = choose_victim(executor)
    assert found is not None
    assert found[0] is second  # the third one would lose what it computed
    assert found[1].freed_blocks == len(second.stay.blocks[0]) - 3
    assert found[1].compute_seconds == 0.0


def test_one_whose_blocks_others_hold_as_well_is_no_use_as_a_victim() -> None:
    _, executor, (first, second, third) = computed(*prompts({}, {}, {}))
    assert first.stay is not None
    assert third.stay is not None
    third.stay.blocks[0][:] = first.stay.blocks[0]
    assert victim(executor) is second


@pytest.mark.parametrize(("bytes_per_second", "swaps"), [(1e9, True), (1e3, False), (None, True)])
def test_the_way_back_is_the_cheaper_one_by_measured_rates(bytes_per_second: float | None, swaps: bool) -> None:
    """12 tokens are 3 blocks of 64 bytes: 12 ms to compute. Before any move was measured, one is tried."""
    _, executor, _ = computed(*prompts({}, {}), disk_blocks=100)
    if bytes_per_second is not None:
        executor.tier_rate.observe(10**6, 10**6 / bytes_per_second)
    found = choose_victim(executor)
    assert found is not None
    assert found[1].swaps == swaps
    assert found[1].seconds == pytest.approx(0.012 if not swaps else 192 / bytes_per_second if bytes_per_second else 0)


def test_without_a_lower_tier_all_is_computed_again() -> None:
    _, executor, _ = computed(*prompts({}, {}))
    found = choose_victim(executor)
    assert found is not None
    assert not found[1].swaps
    assert found[1].seconds == found[1].compute_seconds


def test_nobody_yields_while_blocks_are_on_their_way_out() -> None:
    harness, executor, (first, _) = computed(*prompts({}, {}))
    executor.starved[first.sequence_id] = first
    first.slots_held = first.projected_length
    assert is_stuck(executor, harness.now)
    space = kvmanager_pb2.ExecutorSpace(executor_id="e0", total_block_count=1000, coming_block_count=3)
    take(harness.state, kvmanager_pb2.ReserveResponse(space=[space]), harness.now)
    assert not is_stuck(executor, harness.now)
    assert is_stuck(executor, harness.now + COMING_SECONDS)  # by then they have stood still for too long
    harness.turn()
    assert executor.counters.preemptions == 0
    space.coming_block_count = 0
    take(harness.state, kvmanager_pb2.ReserveResponse(space=[space]), harness.now)
    harness.turn()
    assert executor.counters.preemptions == 1


def test_a_tier_that_hangs_keeps_nobody_waiting() -> None:
    """Its moves never end, so what is under way never comes free: after a while others yield, to be computed again."""
    harness = Harness(
        describe(blocks=64, max_sequences=8, disk_blocks=200), kv=RealKv(), limits=Limits(lookahead_tokens=4)
    )
    harness.sims[0].operations = deque(maxlen=0)
    for handle in range(1, 9):
        harness.send(submit(handle, [handle] * 10, 40, ignore_eos=True))
    harness.settle()
    for handle in range(1, 9):
        assert_correct(harness, handle)
    assert harness.state.executors[0].coming_blocks > 0


@pytest.mark.parametrize("disk_blocks", [0, 12, 200])
@pytest.mark.parametrize("seed", range(6))
def test_answers_are_the_same_however_often_blocks_run_out(seed: int, disk_blocks: int) -> None:
    """E1: a pool for two and a half of them, whatever way they come back."""
    kv = RealKv()
    harness = Harness(
        describe(blocks=32, max_sequences=8, disk_blocks=disk_blocks),
        kv=kv,
        seed=seed,
        limits=Limits(lookahead_tokens=4),
    )
    for handle in range(1, 9):
        harness.send(submit(handle, [handle] * 10, 40, ignore_eos=handle % 2 == 0))
    harness.settle()
    for handle in range(1, 9):
        assert_correct(harness, handle)
    assert harness.state.executors[0].counters.preemptions > 0
    kv.assert_idle(harness.sims)
    if disk_blocks == 200:
        assert harness.sims[0].done, "nothing went to disk"


def test_what_never_fits_alone_is_refused_before_any_of_it_is_computed() -> None:
    kv = RealKv()
    harness = Harness(describe(blocks=10), kv=kv)  # 40 slots
    harness.send(submit(1, [1] * 10, 31, ignore_eos=True), submit(2, [2] * 10, 32, ignore_eos=True))
    harness.settle()
    assert_correct(harness, 1)
    assert harness.clients[2].outputs == {0: []}
    assert not harness.clients[2].started
    end = harness.clients[2].ends[0]
    assert (end.reason, end.error.reason) == (types_pb2.FINISH_REASON_ERROR, "NEVER_FITS")
    assert "42 tokens" in end.error.message
