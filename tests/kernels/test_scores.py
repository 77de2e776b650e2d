"""Native log probabilities against services.executor.sampling.scores."""

import math

import numpy as np
import pytest

from kernels import _native
from services.executor.sampling import scores
from tests.kernels.test_sampler import BIG, NEAR, SETS, SIZES, kinds_of_logits

pytestmark = pytest.mark.parametrize("instruction_set", SETS)


def assert_scores(logits, target, count, instruction_set):
    """Exact but for the rounding of one logarithm, which may merge or part what is nearly equal."""
    chosen, rank, ids, logprobs = _native.score_row(logits, target, count, instruction_set)
    wanted = scores.score([logits], [target], count)
    exact = scores.log_softmax(logits)
    assert chosen == pytest.approx(wanted.chosen[0], abs=NEAR)
    assert (exact > exact[target] + NEAR).sum() < rank <= (exact >= exact[target] - NEAR).sum()
    assert logprobs == pytest.approx(wanted.top_logprobs[0], abs=NEAR)
    assert len(set(ids)) == len(ids) == min(count, len(logits))
    assert np.maximum(exact[ids], scores.LEAST_LOGPROB) == pytest.approx(logprobs, abs=NEAR)
    assert logprobs == sorted(logprobs, reverse=True)


@pytest.mark.parametrize("vocab", [1, 5, *SIZES, BIG])
@pytest.mark.parametrize("count", [0, 1, 5, 20])
def test_scores(count, vocab, instruction_set):
    rng = np.random.default_rng(count)
    for logits in kinds_of_logits(rng, vocab):
        for target in (0, int(logits.argmax()), int(rng.integers(vocab))):
            assert_scores(logits, target, count, instruction_set)


def test_scores_far_from_zero(instruction_set):
    logits = np.random.default_rng(1).normal(0, 1, 257).astype(np.float32)
    for changed in (logits * 1e4, logits + np.float32(1e4), logits * np.float32(1e-4), logits * 1e30):
        assert_scores(changed.astype(np.float32), 9, 20, instruction_set)
    assert _native.score_row(logits * np.float32(1e30), int(logits.argmin()), 0, instruction_set)[0] == -9999.0


def test_equal_alternatives_are_ordered_by_id(instruction_set):
    logits = np.round(np.random.default_rng(1).normal(0, 1, 300)).astype(np.float32)
    wanted = scores.score([logits], [7], 300)
    _, rank, ids, _ = _native.score_row(logits, 7, 300, instruction_set)
    assert (rank, ids) == (wanted.ranks[0], wanted.top_ids[0])
    flat = np.zeros(257, np.float32)
    flat[50] = 1.0
    assert _native.score_row(flat, 60, 3, instruction_set)[1:3] == (2, [50, 0, 1])


def test_more_alternatives_than_tokens(instruction_set):
    assert _native.score_row(np.zeros(4, np.float32), 1, 20, instruction_set)[2] == [0, 1, 2, 3]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_scores_of_bad_rows_are_nan(bad, instruction_set):
    logits = np.zeros(33, np.float32)
    logits[32] = bad
    for row in (logits, np.full(33, -np.inf, np.float32)):
        chosen, rank, ids, logprobs = _native.score_row(row, 3, 2, instruction_set)
        assert math.isnan(chosen)
        assert (rank, ids) == (1, [0, 1])
        assert all(map(math.isnan, logprobs))
