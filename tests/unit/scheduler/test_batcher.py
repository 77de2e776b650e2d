"""What plans grant: credit, chunks, blocks."""

from __future__ import annotations

from typing import cast

import pytest

from quire.v1 import executor_pb2, scheduler_pb2
from services.scheduler.apply import MAX_GRANT_STEPS, apply, grant_steps
from services.scheduler.batcher import plan, step_budget
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


def test_held_sequences_get_nothing() -> None:
    harness, executor = made()
    harness.send(submit(1, [5] * 10, 100), holds=[scheduler_pb2.Hold(handle=1, held=True)])
    place(harness)
    assert executor.running[1].granted_steps == 0
    harness.send(holds=[scheduler_pb2.Hold(handle=1, held=False)])
    assert executor.running[1].granted_steps == 4


@pytest.mark.parametrize(
    ("step_seconds", "steps"), [(0.0, 2), (0.020, 2), (0.005, 4), (0.0024, 9), (0.000001, MAX_GRANT_STEPS)]
)
def test_g_is_about_twenty_milliseconds_of_steps(step_seconds: float, steps: int) -> None:
    assert grant_steps(Limits().grant_seconds, step_seconds) == steps


@pytest.mark.parametrize(
    ("rate", "decoding", "budget"),
    [(1000.0, 0, 512), (1000.0, 8, 100), (1000.0, 90, 122), (10.0, 4, 36), (100_000.0, 8, 512), (0.0, 8, 512)],
)
def test_prompts_take_about_a_tenth_of_a_second_at_a_time_beside_others(
    rate: float, decoding: int, budget: int
) -> None:
    state = State(("e",), Limits(gap_seconds=0.1))
    (executor,) = state.executors
    executor.description = describe(max_step_tokens=512)
    executor.description.prefill_tokens_per_second = rate
    executor.decoding = dict.fromkeys(range(decoding), cast(Sequence, None))
    assert step_budget(state, executor) == budget
