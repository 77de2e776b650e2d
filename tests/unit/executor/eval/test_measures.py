"""Numbers against plain formulas."""

import math

import numpy as np
import pytest
import torch

from services.executor.eval.measures import (
    Distance,
    compare,
    summarize_agreement,
    summarize_fit,
)


def draw_logits(seed: int, rows: int = 5, vocab: int = 301) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 4, (rows, vocab)).astype(np.float32)


def test_log_likelihoods_are_those_of_float64() -> None:
    logits = draw_logits(0) + np.array([[0], [1e4], [-1e4], [80], [3]], np.float32)
    targets = np.array([0, 300, 7, 7, 12], np.int32)
    expected = torch.from_numpy(logits).double().log_softmax(-1)[range(5), targets.tolist()]
    np.testing.assert_allclose(compare([logits], targets)[0][0], expected, rtol=1e-12)


def test_fit() -> None:
    fit = summarize_fit(np.array([-1.0, -2.0, -6.0]), byte_count=4)
    assert fit.scored == 3
    assert fit.nll == pytest.approx(3)
    assert fit.nll_error == pytest.approx(math.sqrt(7 / 3))  # variance 7 of single tokens
    assert fit.perplexity == pytest.approx(math.exp(3))
    assert fit.bits_per_byte == pytest.approx(9 / math.log(2) / 4)


def test_fit_of_one_token_without_bytes() -> None:
    fit = summarize_fit(np.array([-2.0]), byte_count=0)
    assert (fit.nll_error, fit.bits_per_byte) == (0.0, None)


def test_distance_of_each_row() -> None:
    reference, candidate = draw_logits(1), draw_logits(1) + draw_logits(2) * np.float32(0.3)
    candidate[2] = reference[2]
    candidate[3, reference[3].argmax()] -= 50
    (found,) = compare([reference, candidate], np.zeros(5, np.int32))[1]
    p, q = (torch.from_numpy(logits).double() for logits in (reference, candidate))
    kl = (p.softmax(-1) * (p.log_softmax(-1) - q.log_softmax(-1))).sum(-1)
    np.testing.assert_allclose(found.kl, kl, rtol=1e-9, atol=1e-14)
    np.testing.assert_allclose(found.logit_error, (q - p).norm(dim=-1) / p.norm(dim=-1), rtol=1e-9)
    assert found.kl[2] == found.logit_error[2] == 0
    assert found.same_top.tolist() == (p.argmax(-1) == q.argmax(-1)).tolist()
    assert found.same_top[2]
    assert not found.same_top[3]


def test_kl_is_that_of_the_candidate_from_the_reference() -> None:
    sure, even = np.array([[20.0, 0.0]], np.float32), np.zeros((1, 2), np.float32)
    first = np.zeros(1, np.int32)
    assert compare([sure, even], first)[1][0].kl[0] == pytest.approx(math.log(2), abs=1e-6)
    assert compare([even, sure], first)[1][0].kl[0] == pytest.approx(10 - math.log(2), abs=1e-6)


def test_agreement_of_several_pieces() -> None:
    parts = [
        Distance(np.array([True, False]), np.array([0.1, 0.3]), np.array([1.0, 5.0])),
        Distance(np.array([True]), np.array([0.2]), np.array([2.0])),
    ]
    found = summarize_agreement(parts)
    assert found.positions == 3
    assert found.top1_agreement == pytest.approx(2 / 3)
    assert found.kl_mean == pytest.approx(0.2)
    assert found.kl_p99 == pytest.approx(0.298)
    assert (found.logit_error_median, found.logit_error_max) == (2.0, 5.0)
