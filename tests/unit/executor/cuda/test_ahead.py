"""Which step may be begun ahead, and which one is the one that was begun."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from services.executor.backends.base import PromptScoreRows, SampleRow, SamplingRule, StepInputs
from services.executor.backends.cuda.ahead import goes_on, may_go_on
from services.executor.backends.cuda.draws import plan_draws

SIZE = 4


def decode(contexts: list[int], tokens: list[int], samples: list[SampleRow], width: int = 4) -> StepInputs:
    count = len(contexts)
    for row, sample in enumerate(samples):
        sample.row = row
    return StepInputs(
        token_ids=np.array(tokens, np.int32),
        positions=np.array(contexts, np.int32) - 1,
        query_starts=np.arange(count + 1, dtype=np.int32),
        context_lengths=np.array(contexts, np.int32),
        block_tables=np.arange(1, count * width + 1, dtype=np.int32).reshape(count, width),
        samples=samples,
        room=lambda: np.full(count, width * SIZE, np.int32),
    )


def samples(count: int, **rule: object) -> list[SampleRow]:
    return [SampleRow(0, SamplingRule(**rule), [1, 2], [3]) for _ in range(count)]  # type: ignore[arg-type]


def test_plain_decodes_may_go_on() -> None:
    rows = samples(2)
    inputs = decode([5, 9], [7, 8], rows)
    assert may_go_on(inputs, plan_draws(rows, None), 100)
    assert not may_go_on(inputs, plan_draws(rows, None), 9), "the context ends there"
    assert not may_go_on(decode([5, 16], [7, 8], rows), plan_draws(rows, None), 100), "the next token has no slot"


@pytest.mark.parametrize(
    "change",
    [
        lambda inputs: replace(inputs, room=None),
        lambda inputs: replace(inputs, room=lambda: None),
        lambda inputs: replace(inputs, layers=1),
        lambda inputs: replace(inputs, prompt_scores=[PromptScoreRows(0, [1], 0)]),
        lambda inputs: replace(inputs, token_ids=np.array([7, 8, 9], np.int32)),
    ],
)
def test_others_may_not(change: Callable[[StepInputs], StepInputs]) -> None:
    rows = samples(2)
    assert not may_go_on(change(decode([5, 9], [7, 8], rows)), plan_draws(rows, None), 100)


def test_a_ban_that_ends_is_no_step_ahead() -> None:
    for minimum, may in ((1, True), (2, False), (3, True)):  # one token is out
        rows = samples(1, min_tokens=minimum, banned_until_min_tokens=(4,))
        assert may_go_on(decode([5], [7], rows), plan_draws(rows, None), 100) == may


def test_the_next_step_is_recognized_and_no_other() -> None:
    rows = samples(2)
    before = decode([5, 8], [7, 8], rows)
    now = decode([6, 9], [50, 60], rows)
    assert goes_on(before, [50, 60], now, SIZE)
    assert not goes_on(before, [50, 61], now, SIZE)
    assert not goes_on(before, [50, -1], now, SIZE)
    assert not goes_on(before, [50, 60], decode([6, 10], [50, 60], rows), SIZE)
    assert not goes_on(before, [50, 60], decode([6, 9], [50, 60], samples(2)), SIZE), "other sequences"
    assert not goes_on(before, [50, 60], decode([6], [50], rows[:1]), SIZE)
    rows[0].draft_ids = [1]
    assert not goes_on(before, [50, 60], now, SIZE)


def test_blocks_that_are_read_must_be_the_same() -> None:
    rows = samples(2)
    before = decode([5, 8], [7, 8], rows)
    for place, same in (((0, 1), False), ((0, 2), True), ((1, 2), False), ((1, 3), True)):
        now = decode([6, 9], [50, 60], rows)
        now.block_tables[place] = 99
        assert goes_on(before, [50, 60], now, SIZE) == same
    narrow = replace(before, block_tables=before.block_tables[:, :2])
    assert not goes_on(narrow, [50, 60], decode([6, 9], [50, 60], rows), SIZE), "its block was not there yet"
