"""Tokens fed back on the GPU against the plain operations."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from kernels.next_step import DecodeState, feed_back, feed_back_plainly


def state_of(count: int) -> DecodeState:
    generator = torch.Generator().manual_seed(count)
    positions = torch.randint(0, 25, (count,), generator=generator)
    return DecodeState(
        tokens=torch.full((count,), -7),
        positions=positions,
        slots=torch.full((count,), -1),
        contexts=(positions + 1).to(torch.int32),
        draws=torch.randint(0, 9, (count,), dtype=torch.int32, generator=generator),
        tables=torch.randint(0, 500, (count, 6), dtype=torch.int32, generator=generator),
    )


def on(state: DecodeState, device: torch.device) -> DecodeState:
    return DecodeState(*(getattr(state, field.name).clone().to(device) for field in fields(state)))


@pytest.mark.parametrize(("size", "count"), [(1, 1), (5, 3), (131, 130)])
def test_feed_back_equals_plain(size: int, count: int, device: torch.device) -> None:
    drawn = torch.randint(-1, 1000, (size,), dtype=torch.int32, generator=torch.Generator().manual_seed(1))
    expected, found = state_of(size), on(state_of(size), device)
    feed_back_plainly(expected, drawn, count, 5)
    feed_back(found, drawn.to(device), count, 5)
    for field in fields(expected):
        assert torch.equal(getattr(found, field.name).cpu(), getattr(expected, field.name)), field.name


def test_refuses_what_does_not_fit(device: torch.device) -> None:
    state = on(state_of(3), device)
    with pytest.raises(ValueError, match="feed_back of 4: tokens"):
        feed_back(state, torch.zeros(4, dtype=torch.int32, device=device), 4, 5)
    with pytest.raises(ValueError, match="feed_back of 3 from"):
        feed_back(state, torch.zeros(2, dtype=torch.int32, device=device), 3, 5)
