"""What plans grant: credit, chunks, blocks."""

from __future__ import annotations

from typing import cast

import pytest

from quire.v1 import executor_pb2, scheduler_pb2, types_pb2
from services.common.constraints.limits import weight
from services.scheduler.apply import MAX_GRANT_STEPS, apply, grant_steps
from services.scheduler.batcher import plan
from services.scheduler.pace import StepTime
from services.scheduler.room import prefill_room, step_budget
from services.scheduler.sequence import Sequence
from services.scheduler.state import Executor, Limits, State
from tests.unit.scheduler.sim import Harness, submit
from tests.unit.scheduler.sim_executor import describe


def place(harness: Harness) -> None:
    """Delivers what goes to and from the kvmanager, and nothing else."""
    while harness.to_kv or harness.from_kv:
        harness._do("to_kv" if harness.to_kv else "from_kv", 0)
        harness.turn()


def made(**fields: object) -> tuple[Harness, Executor]:
    harness = Harness(describe(blocks=1000, block_size=4, max_step_tokens=32, max_sequences=64, **fields))
    return harness, harness.state.executors[0]


def grants(message: executor_pb2.StepPlan) -> list[tuple[int, int, int]]:
    return list(zip(message.sequence_ids, message.token_limits, message.step_counts, strict=True))


def answer(
    harness: Harness, executor: Executor, stay: int, tokens: list[int], computed: int, steps: int, last_plan: int = 0
) -> None:
    message = executor_pb2.StepResults(
        epoch=executor.epoch,
        sequence_number=executor.acknowledged_results + 1,
        last_plan=last_plan or executor.step,
        sequence_ids=[stay],
        token_counts=[len(tokens)],
        token_ids=tokens,
        computed_lengths=[computed],
        step_counts=[steps],
    )
    apply(harness.state, executor, message, harness.now)


def test_entry_prompt_and_first_credit_come_in_one_plan() -> None:
    harness, executor = made()
    harness.send(submit(1, [5] * 10, 100))
    place(harness)
    (message,) = harness.plans[0]
    assert [s.sequence_id for s in message.enter] == [1]
    assert grants(message) == [(1, 10, 1), (1, 1, 3)]  # the prompt, then 2G steps in all
    assert message.report_credit == executor.grant_steps == 2
    assert message.step == 1


def test_credit_is_topped_up_at_g_only() -> None:
    harness, executor = made()
    harness.send(submit(1, [5] * 10, 100))
    place(harness)
    answer(harness, executor, 1, [7], 10, 1)
    assert plan(harness.state, executor, 32, 0.0) is None  # 3 of 4 steps are unanswered
    answer(harness, executor, 1, [8], 11, 1)
    message = plan(harness.state, executor, 32, 0.0)
    assert message is not None
    assert grants(message) == [(1, 1, 2)]
    assert message.acknowledged_results == 2
    assert plan(harness.state, executor, 32, 0.0) is None


def test_one_that_falls_to_g_tops_up_all() -> None:
    harness, executor = made()
    harness.send(submit(1, [5] * 4, 100), submit(2, [6] * 4, 100))
    place(harness)
    answer(harness, executor, 1, [7], 4, 1)
    answer(harness, executor, 2, [7], 4, 1)
    answer(harness, executor, 1, [8], 5, 1)
    message = plan(harness.state, executor, 32, 0.0)
    assert message is not None
    assert grants(message) == [(1, 1, 2), (2, 1, 1)]


def test_credit_ends_with_the_output_budget() -> None:
    harness, executor = made()
    harness.send(submit(1, [5] * 10, 3))
    place(harness)
    assert grants(harness.plans[0][0]) == [(1, 10, 1), (1, 1, 2)]  # three tokens in all
    answer(harness, executor, 1, [7, 8], 11, 2)
    assert plan(harness.state, executor, 32, 0.0) is None


def test_stop_strings_get_two_steps() -> None:
    harness, executor = made()
    harness.send(submit(1, [5] * 10, 100, stop=["x"]), submit(2, [5] * 10, 100))
    place(harness)
    message = harness.plans[0][-1]
    assert executor.running[1].granted_steps == 2
    assert executor.running[2].granted_steps == 4
    assert message.report_credit == 1
    answer(harness, executor, 1, [7], 10, 1)
    small = plan(harness.state, executor, 32, 0.0)
    assert small is not None
    assert grants(small) == [(1, 1, 1)]  # the other one needs nothing


def test_long_prompt_goes_in_chunks_beside_decodes() -> None:
    """I2: two chunks in flight, each within the step's budget less what decodes."""
    harness, executor = made()
    harness.send(submit(1, [5] * 4, 100))
    place(harness)
    answer(harness, executor, 1, [7], 4, 1)
    harness.send(submit(2, [6] * 100, 5))
    place(harness)
    long = [grant for message in harness.plans[0] for grant in grants(message) if grant[0] == 2]
    assert long == [(2, 31, 1), (2, 31, 1)]
    answer(harness, executor, 2, [], 31, 1)
    message = plan(harness.state, executor, 32, 0.0)
    assert message is not None
    assert (2, 31, 1) in grants(message)
    answer(harness, executor, 2, [], 93, 2)
    message = plan(harness.state, executor, 32, 0.0)
    assert message is not None
    assert [g for g in grants(message) if g[0] == 2] == [(2, 7, 1), (2, 1, 3)]


def test_prompts_share_the_budget_first_come_first_served() -> None:
    harness, executor = made()
    harness.send(submit(1, [5] * 40, 5), submit(2, [6] * 40, 5))
    place(harness)
    given = [grant for message in harness.plans[0] for grant in grants(message)]
    assert given == [(1, 32, 1), (1, 8, 1), (1, 1, 2)]
    answer(harness, executor, 1, [], 32, 1)
    message = plan(harness.state, executor, 32, 0.0)
    assert message is not None
    # Beside the other's last 8 tokens, and with one decode set aside.
    assert grants(message) == [(2, 23, 1), (2, 17, 1), (1, 1, 1), (2, 1, 2)]


def test_prefill_keeps_a_quarter_of_the_budget() -> None:
    harness, executor = made()
    harness.send(*(submit(h, [h], 100) for h in range(1, 41)))
    place(harness)
    for stay in range(1, 41):
        answer(harness, executor, stay, [7], 1, 1)
        harness.turn()
    assert len(executor.decoding) == 40
    harness.send(submit(50, [6] * 100, 5))
    place(harness)
    assert [limit for stay, limit, _ in grants(harness.plans[0][-1]) if stay == 41] == [8, 8]


def test_no_credit_past_the_blocks_and_more_asked_ahead() -> None:
    harness, executor = made()
    harness.send(submit(1, [5] * 10, 100))
    place(harness)
    sequence = executor.running[1]
    held = sequence.slots_held
    for position in range(30):
        answer(harness, executor, 1, [7], 10 + position, 1)
        plan(harness.state, executor, 32, 0.0)
        if sequence.granted_steps == 0:
            break
    assert sequence.projected_length == sequence.slots_held == held
    assert sequence.slots_asked > held
    assert harness.state.extends == [sequence]


def test_steps_are_no_fewer_for_the_drafts_that_they_admit() -> None:
    harness, executor = made(most_drafts=16, weighs_drafts=True)
    harness.send(submit(1, [5] * 10, 1000))
    place(harness)
    (message,) = harness.plans[0]
    assert grants(message) == [(1, 10, 1), (1, 1, 3)]
    assert list(message.draft_limits) == [0, 16]
    sequence = executor.running[1]
    assert sequence.slots_held < 10 + 3 * 17
    (credit,) = message.draft_credits[1:]
    assert 0 < credit <= sequence.slots_held - 10 - 3 - executor.grant_steps
    assert sequence.projected_length == 10 + 3 + credit


def test_blocks_are_asked_for_once_drafts_took_many_whatever_credit_is_left() -> None:
    harness, executor = made(most_drafts=16, weighs_drafts=True)
    executor.grant_steps = 3
    harness.send(submit(1, [5] * 10, 1000))
    place(harness)
    sequence = executor.running[1]
    held, left = sequence.slots_held, sequence.granted_steps - 2
    assert left > executor.grant_steps
    assert sequence.slots_asked == held
    harness.state.extends.clear()
    took = min(16, sequence.draft_credit)
    message = executor_pb2.StepResults(
        epoch=executor.epoch,
        sequence_number=executor.acknowledged_results + 1,
        last_plan=executor.step,
        sequence_ids=[1],
        token_counts=[2 + took],
        token_ids=[7] * (2 + took),
        computed_lengths=[11 + took],
        step_counts=[2],
        draft_step_counts=[1],
        proposed_counts=[took],
        accepted_counts=[took],
    )
    apply(harness.state, executor, message, harness.now)
    assert sequence.granted_steps == left
    assert harness.state.extends == [sequence]
    assert sequence.slots_asked > held


def test_held_sequences_get_nothing() -> None:
    harness, executor = made()
    harness.send(submit(1, [5] * 10, 100), holds=[scheduler_pb2.Hold(handle=1, held=True)])
    place(harness)
    assert executor.running[1].granted_steps == 0
    harness.send(holds=[scheduler_pb2.Hold(handle=1, held=False)])
    assert executor.running[1].granted_steps == 4


@pytest.mark.parametrize(("step_seconds", "steps"), [(0.020, 2), (0.005, 4), (0.0024, 9), (0.000001, MAX_GRANT_STEPS)])
def test_g_is_about_twenty_milliseconds_of_steps(step_seconds: float, steps: int) -> None:
    assert grant_steps(Limits().grant_seconds, step_seconds) == steps


def decoding(count: int, **stated: float) -> tuple[State, Executor]:
    """An executor on which so many sequences decode: what it says of itself is all that is known of it."""
    state = State(("e",), Limits(gap_seconds=0.1, gap_stretch=2.5))
    (executor,) = state.executors
    description = describe(max_step_tokens=512)
    for name, value in stated.items():
        setattr(description, name, value)
    executor.describe(description)
    executor.decoding = dict.fromkeys(range(count), cast(Sequence, None))
    return state, executor


@pytest.mark.parametrize(
    ("rate", "count", "room"),
    [
        (1000.0, 0, 512),  # nobody waits for a token
        (1000.0, 8, 25),  # a step of 17 ms may take 42.5 ms
        (1000.0, 90, 16),  # one of 99 ms is as long as any may be: the least chunk
        (100.0, 4, 16),  # 20 ms in which 2 tokens would fit
        (100_000.0, 8, 504),  # the executor's own limit
    ],
)
def test_prompts_stretch_a_step_beside_decodes_by_so_much(rate: float, count: int, room: int) -> None:
    state, executor = decoding(count, prefill_tokens_per_second=rate, decode_step_seconds=0.010)
    assert prefill_room(state, executor, step_budget(state, executor)) == room


@pytest.mark.parametrize(("target", "room"), [(1.0, 25), (0.0305, 13), (0.001, 8)])
def test_a_clients_target_for_its_gaps_narrows_chunks_and_holds_none_up(target: float, room: int) -> None:
    state, executor = decoding(8, prefill_tokens_per_second=1000.0, decode_step_seconds=0.010)
    executor.target_gaps[target] += 1
    executor.target_gaps[2.0] += 1
    assert prefill_room(state, executor, 512) == room


def test_a_prompt_beside_one_that_ends_its_own_leaves_room_for_its_tokens() -> None:
    """Nobody decodes in the first of the two steps ahead, but in the second: that one is not filled to the brim."""
    harness = Harness(describe(blocks=1000, max_step_tokens=512, max_sequences=64), limits=Limits(lookahead_tokens=8))
    executor = harness.state.executors[0]
    executor.step_time = StepTime(base=0.009, row=0.001, token=0.001)
    harness.send(submit(1, [5] * 300, 5), submit(2, [6] * 500, 5))
    place(harness)
    chunks = [grant for message in harness.plans[0] for grant in grants(message) if grant[1] > 1]
    assert chunks == [(1, 300, 1), (2, 212, 1), (2, 16, 1)]  # beside a step of 10 ms: 15 ms of prefill, at least 16


def test_plans_follow_measured_steps() -> None:
    """A machine that is slower than it said is given smaller chunks, and one whose steps are short more at a time."""
    harness, executor = made()
    executor.step_time = StepTime(base=0.05, row=0.0002, token=0.0002)
    harness.send(submit(1, [5] * 10, 100))
    place(harness)
    for number in range(200):
        chunk, slow = 100 * (number % 2), 0.010 + 0.2 * (number % 2)
        timings = executor_pb2.StepTimings(step_count=1, compute_seconds=slow, token_count=1 + chunk, sampled_count=1)
        message = executor_pb2.StepResults(
            epoch=executor.epoch, sequence_number=executor.acknowledged_results + 1, timings=timings
        )
        apply(harness.state, executor, message, harness.now)
    assert executor.step_time.token == pytest.approx(0.002, rel=0.1)
    assert executor.step_seconds == pytest.approx(0.010, rel=0.25)
    assert executor.grant_steps == 2


def test_every_choice_carries_the_rule_of_its_output() -> None:
    harness, _ = made()
    wanted = submit(1, [5] * 10, 100)
    wanted.choice_count = 2
    wanted.constraint.regex = "a+"
    harness.send(wanted)
    harness.send(submit(2, [5] * 10, 100))
    place(harness)
    entered = {state.request_id: state for plans in harness.plans for message in plans for state in message.enter}
    assert entered["r1"].constraint == wanted.constraint
    assert not entered["r2"].HasField("constraint")


def test_rules_count_in_the_size_of_a_message() -> None:
    assert weight(None) == 0
    assert weight(types_pb2.Constraint(regex="a" * 3000)) >= 1000
