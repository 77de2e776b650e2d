"""What a step takes, learned from reports: it converges, shrugs off noise and pauses, and stays a possible time."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.pace import LEAST_CHUNK, NARROW_CHUNK, StepTime, TierRate
from tests.unit.scheduler.sim_executor import describe

TRUE = StepTime(base=0.003, row=0.001, token=0.0008)


def seconds(steps: int, rows: int, tokens: int) -> float:
    return TRUE.base * steps + TRUE.row * rows + TRUE.token * tokens


def learn(learner: StepTime, reports: int, noise: float, pauses: float, seed: int = 1) -> None:
    """A load whose decoding rows and chunks change. `pauses`: the part of reports that take a hundred times as long."""
    draw = random.Random(seed)
    for _ in range(reports):
        steps = draw.randrange(1, 4)
        rows = steps * draw.choice((1, 4, 8, 32))
        tokens = draw.choice((0, 0, 16, 64, 512))
        taken = seconds(steps, rows, tokens) * draw.uniform(1 - noise, 1 + noise)
        learner.observe(steps, rows, tokens, taken * (100 if draw.random() < pauses else 1))


@pytest.mark.parametrize(
    "stated", [StepTime(0.003, 0.001, 0.0008), StepTime(0.1, 0.01, 0.01), StepTime(1e-4, 1e-5, 1e-5)]
)
def test_measured_steps_correct_what_was_stated(stated: StepTime) -> None:
    learn(stated, 3000, noise=0.0, pauses=0.0)
    for rows in (1, 8, 32):
        assert stated.step(rows) == pytest.approx(TRUE.step(rows), rel=0.1)
    assert stated.prefill(100) == pytest.approx(TRUE.prefill(100), rel=0.1)


def test_noise_and_pauses_move_it_little() -> None:
    learner = StepTime(0.003, 0.001, 0.0008)
    learn(learner, 3000, noise=0.3, pauses=0.01)
    for rows in (1, 8, 32):
        assert learner.step(rows) == pytest.approx(TRUE.step(rows), rel=0.35)
    assert learner.prefill(100) == pytest.approx(TRUE.prefill(100), rel=0.35)


def test_one_pause_counts_for_twice_a_step_at_most() -> None:
    learner = StepTime(0.003, 0.001, 0.0008)
    before = learner.step(8)
    learner.observe(1, 8, 0, 60.0)
    assert learner.step(8) == pytest.approx(1.1 * before)


def test_decodes_alone_leave_what_is_known_of_prefill() -> None:
    learner = StepTime(0.003, 0.001, 0.0008)
    for _ in range(1000):
        learner.observe(2, 16, 0, 0.1)
    assert learner.step(8) == pytest.approx(0.05, rel=0.01)
    assert learner.token == 0.0008


@given(st.lists(st.tuples(st.integers(0, 64), st.integers(0, 4096), st.integers(0, 10**6), st.floats(-1.0, 1e6))))
def test_whatever_is_reported_it_stays_a_time_and_chunks_within_bounds(reports) -> None:
    learner = StepTime.stated(describe())
    for report in reports:
        learner.observe(*report)
        assert min(learner.base, learner.row, learner.token) > 0
        assert learner.chunk(8, 2.5, 0.15) >= LEAST_CHUNK
        assert (
            NARROW_CHUNK <= learner.chunk(8, 2.5, 0.15, target=1e-9) <= max(learner.chunk(8, 2.5, 0.15), NARROW_CHUNK)
        )


def test_an_executor_that_says_nothing_is_taken_for_an_ordinary_one() -> None:
    description = describe()
    description.decode_step_seconds = description.prefill_tokens_per_second = 0.0
    assert StepTime.stated(description).step(1) == pytest.approx(0.020)
    assert StepTime.stated(description).prefill(1000) == pytest.approx(1.0)


def test_moves_of_late_count_most() -> None:
    rate = TierRate()
    assert rate.move(10**9) == 0.0  # nothing known: worth a try
    for _ in range(100):
        rate.observe(10**6, 0.010)
    assert rate.move(10**8) == pytest.approx(1.0)
    for _ in range(100):
        rate.observe(10**6, 0.001)
    assert rate.move(10**8) == pytest.approx(0.1, rel=0.01)
