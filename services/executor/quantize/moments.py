"""What is kept of a matrix's inputs over all calibration text."""

from __future__ import annotations

import torch
from torch import Tensor


class SecondMoments:
    """Sums over inputs x [K]: x x.T, which gives any error of the outputs, and magnitudes."""

    def __init__(self, width: int) -> None:
        self.gram = torch.zeros(width, width)
        self._magnitudes = torch.zeros(width)
        self._count = 0

    def add(self, x: Tensor) -> None:
        """Inputs [rows, K] fp32."""
        self.gram.addmm_(x.t(), x)
        self._magnitudes += x.abs().sum(0)
        self._count += len(x)

    @property
    def mean_magnitude(self) -> Tensor:
        """[K]"""
        return self._magnitudes / self._count


class Peaks:
    """The largest magnitude of each input [K]."""

    def __init__(self, width: int) -> None:
        self.largest = torch.zeros(width)

    def add(self, x: Tensor) -> None:
        """Inputs [rows, K] fp32."""
        torch.maximum(self.largest, x.abs().amax(0), out=self.largest)


def output_error(difference: Tensor, gram: Tensor) -> float:
    """The sum over all inputs of the squares of what a difference of weights [N, K] makes of the outputs."""
    return float((difference @ gram).mul_(difference).sum())
