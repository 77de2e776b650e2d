"""Draws as arrays: a row for each token, drafts before it as output."""

from __future__ import annotations

import math

import numpy as np

from services.executor.backends.base import SampleRow, SamplingRule
from services.executor.backends.cuda.draws import mask_bits, plan_draws


class Masks:
    """Filled masks."""

    def __init__(self, bits: list[list[int]], first_rows: list[int]) -> None:
        self.bits, self.first_rows = np.array(bits, np.uint32), np.array(first_rows, np.int32)

    def wait(self) -> None: ...

    def when_filled(self, told) -> None:
        told()


def test_a_row_for_each_token() -> None:
    rows = [
        SampleRow(3, SamplingRule(temperature=0.5, seed=-3), [1], [2, 3], draft_ids=[7, 8]),
        SampleRow(9, SamplingRule(min_p=0.5, seed=1 << 63), [1], [], draft_ids=[4, 5], first_place=2),
    ]
    draws = plan_draws(rows, None)
    assert draws.rows.tolist() == [3, 4, 5, 9]
    assert draws.positions.tolist() == [2, 3, 4, 2]
    assert draws.rules["temperature"].tolist() == [0.5, 0.5, 0.5, 1.0]
    assert draws.rules["seeds"].tolist() == [-3, -3, -3, -(1 << 63)]
    assert np.float32(math.log(0.5)) == draws.rules["min_p_floor"][3]
    assert draws.is_plain
    assert plan_draws([], None).rows.tolist() == []


def test_bans_end_within_a_run_of_drafts() -> None:
    rule = SamplingRule(min_tokens=3, banned_until_min_tokens=(6, 9), logit_bias={9: 1.0, 2: 0.5})
    draws = plan_draws([SampleRow(0, rule, [1], [2, 3], draft_ids=[7])], None)
    assert draws.changes is not None
    ids, values = draws.changes
    found = [dict(zip(row, value, strict=True)) for row, value in zip(ids.tolist(), values.tolist(), strict=True)]
    assert found == [{9: -math.inf, 2: 0.5, 6: -math.inf}, {9: 1.0, 2: 0.5, -1: 0.0}]


def test_drafts_count_as_output_where_a_rule_penalizes() -> None:
    rule = SamplingRule(presence_penalty=1.0)
    draws = plan_draws([SampleRow(0, rule, [1], [2], draft_ids=[7, 8]), SampleRow(3, SamplingRule(), [1], [2])], None)
    assert draws.drafts is not None
    assert draws.drafts.tolist() == [[-1, -1], [7, -1], [7, 8], [-1, -1]]
    assert draws.penalized.tolist() == [True, False]


def test_masks_follow_their_rows() -> None:
    rows = [SampleRow(0, SamplingRule(), [1], [], draft_ids=[7]), SampleRow(2, SamplingRule(), [1], [])]
    draws = plan_draws(rows, Masks([[5, 1], [6, 0]], [0, -1]))
    assert mask_bits(draws, 40).view(np.uint32).tolist() == [[5, 1], [6, 0], [0xFFFFFFFF, 0xFFFFFFFF]]
    rows[1].allowed = np.array([9, 9], np.uint32)
    alone = plan_draws(rows[1:], None)
    assert not alone.is_plain
    assert mask_bits(alone, 40).tolist() == [[9, 9]]
