"""The cost model of steps: what it is fitted to, and its file."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from services.executor.cost_model import CostModel, Machine, StepShape, fit

COST = CostModel(step=0.002, decode_row=0.001, context_token=2e-7, prompt_token=5e-4, prompt_pair=1e-8)
MACHINE = Machine(
    description={"model": "m"},
    cost=COST,
    residuals={"median": 0.01},
    block_size=32,
    block_bytes=1,
    block_count=10,
    max_sequences=4,
    max_step_tokens=64,
    context_length=100,
    vocab_size=10,
)


def _shapes(count: int) -> list[StepShape]:
    draw = random.Random(0)
    shapes = []
    for _ in range(count):
        counts = [1] * draw.randrange(1, 33) + [draw.randrange(2, 200) for _ in range(draw.randrange(3))]
        shapes.append(StepShape.of(counts, [count + draw.randrange(2000) for count in counts]))
    return shapes


def test_shapes_count_rows_and_pairs() -> None:
    assert StepShape.of([1, 1], [10, 20]) == StepShape(2, 30, 0, 0)
    assert StepShape.of([3], [3]) == StepShape(0, 0, 3, 1 + 2 + 3)
    assert StepShape.of([3], [10]) == StepShape(0, 0, 3, 8 + 9 + 10)


def test_exact_times_give_back_their_model() -> None:
    found = fit([(shape, COST.seconds(shape)) for shape in _shapes(50)])
    assert found.cost.step == pytest.approx(COST.step, rel=1e-6)
    assert found.cost.context_token == pytest.approx(COST.context_token, rel=1e-6)
    assert found.p95_error < 1e-6
    assert found.step_count == 50


def test_no_term_is_negative_whatever_was_measured() -> None:
    """Longer contexts took less time: the best model that makes sense has no term for them."""
    steps = [(shape, 0.010 - 1e-7 * shape.context_tokens) for shape in _shapes(50)]
    cost = fit(steps).cost
    assert cost.context_token == 0
    assert min(cost.step, cost.decode_row, cost.prompt_token, cost.prompt_pair) >= 0


def test_noise_shows_in_the_errors() -> None:
    draw = random.Random(1)
    found = fit([(shape, COST.seconds(shape) * draw.uniform(0.9, 1.1)) for shape in _shapes(400)])
    assert found.cost.decode_row == pytest.approx(COST.decode_row, rel=0.1)
    assert 0.02 < found.median_error < 0.08 < found.p95_error < 0.12


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="4 measured steps cannot tell 5 terms apart"):
        fit([(shape, 0.01) for shape in _shapes(4)])


def test_a_model_in_which_steps_take_no_time_is_refused() -> None:
    with pytest.raises(ValueError, match="takes time"):
        CostModel(0.0, 0.0, 1.0, 1.0, 1.0)
    with pytest.raises(ValueError, match="negative"):
        CostModel(1.0, -1.0, 0.0, 0.0, 0.0)


def test_a_machine_is_read_as_it_was_written(tmp_path: Path) -> None:
    MACHINE.write(tmp_path / "machine.json")
    assert Machine.read(tmp_path / "machine.json") == MACHINE


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"cost": {"step": 1}}'])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "machine.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"machine\.json: no description of a machine"):
        Machine.read(path)


def test_sizes_of_zero_are_refused(tmp_path: Path) -> None:
    replace(MACHINE, block_count=0).write(tmp_path / "machine.json")
    with pytest.raises(ValueError, match="above zero"):
        Machine.read(tmp_path / "machine.json")
