"""Weights and inputs that differ in size and hang together, as those of models do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

Made = tuple[Tensor, Tensor]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def correlated() -> Callable[..., Made]:
    """Weights [rows, columns] and inputs [512, columns] of a few common causes; some inputs are far larger."""

    def make(rows: int, columns: int, seed: int = 0) -> Made:
        generator = torch.Generator().manual_seed(seed)

        def normal(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator)

        inputs = normal(512, columns // 4) @ normal(columns // 4, columns) / columns**0.5 + 0.3 * normal(512, columns)
        inputs *= torch.exp(normal(columns))
        return normal(rows, columns) * torch.exp(0.5 * normal(rows, 1)), inputs

    return make
