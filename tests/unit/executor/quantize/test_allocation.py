"""Bytes are spent where they save most."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

from services.executor.quantize.allocation import Option, allocate, lower_hull
from services.executor.quantize.grid import Grid


def option(size: int, loss: float) -> Option:
    return Option(Grid(4, 32, True, torch.float16), size, loss)


def test_spends_where_a_byte_saves_most() -> None:
    options = {"dull": [option(10, 2.0), option(20, 1.0)], "keen": [option(10, 9.0), option(20, 3.0), option(40, 0.0)]}
    sizes = {budget: {n: o.bytes for n, o in allocate(options, budget).items()} for budget in (20, 29, 30, 40, 50, 99)}
    assert sizes == {
        20: {"dull": 10, "keen": 10},
        29: {"dull": 10, "keen": 10},
        30: {"dull": 10, "keen": 20},
        40: {"dull": 20, "keen": 20},  # 20 bytes more for `keen` would save more a byte, but there are 10
        50: {"dull": 10, "keen": 40},
        99: {"dull": 20, "keen": 40},
    }


def test_too_few_bytes() -> None:
    with pytest.raises(ValueError, match="the smallest take 30 bytes"):
        allocate({"a": [option(10, 1.0)], "b": [option(20, 1.0), option(30, 0.0)]}, 29)


def test_the_hull_leaves_out_what_no_price_makes_the_best() -> None:
    found = lower_hull([option(40, 0.0), option(10, 9.0), option(20, 8.0), option(30, 2.0), option(35, 2.0)])
    assert [o.bytes for o in found] == [10, 30, 40]


def test_is_as_good_as_trying_all_where_the_hull_is_spent() -> None:
    """And never spends more than there is."""
    random = np.random.default_rng(0)
    for _ in range(50):
        options = {
            name: [
                option(1 + int(size), float(loss))
                for size, loss in zip(random.integers(1, 50, 4), random.random(4), strict=True)
            ]
            for name in "abcd"
        }
        least = sum(min(o.bytes for o in own) for own in options.values())
        budget = least + int(random.integers(0, 60))
        chosen = allocate(options, budget)
        spent, loss = sum(o.bytes for o in chosen.values()), sum(o.loss for o in chosen.values())
        assert spent <= budget
        combinations = [(sum(o.bytes for o in own), sum(o.loss for o in own)) for own in product(*options.values())]
        within = min(other for size, other in combinations if size <= budget)
        one_step = max(max(o.loss for o in own) for own in options.values())
        assert min(other for size, other in combinations if size <= budget) - 1e-9 <= loss <= within + one_step
