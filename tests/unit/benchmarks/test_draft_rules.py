"""How often the two rules accept a draft: against drawing."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.draft_rules import rejection, shared_noise


@pytest.mark.parametrize("seed", range(3))
def test_shared_noise_agrees_with_drawing(seed: int) -> None:
    draw = np.random.default_rng(seed)
    p, q = draw.dirichlet(np.full(6, 0.5), 2)
    p[0] = 0.0
    p /= p.sum()
    noise = draw.exponential(size=(200_000, 6))
    with np.errstate(divide="ignore"):
        agreed = float(((noise / p).argmin(1) == (noise / q).argmin(1)).mean())
    assert shared_noise(p, q) == pytest.approx(agreed, abs=0.005)
    distance = 1 - rejection(p, q)
    assert (1 - distance) / (1 + distance) <= shared_noise(p, q) <= 1 - distance


def test_equal_distributions_always_agree_and_disjoint_ones_never() -> None:
    p = np.array([0.5, 0.25, 0.25, 0.0])
    assert shared_noise(p, p) == rejection(p, p) == 1.0
    q = np.array([0.0, 0.0, 0.0, 1.0])
    assert shared_noise(p, q) == rejection(p, q) == 0.0
