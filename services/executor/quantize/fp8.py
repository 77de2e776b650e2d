"""Rounding to e4m3: one scale a matrix, a row or a block brings its largest weight to the largest number."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from services.executor.quant.matrix import FP8_MAX, Fp8Matrix
from services.executor.quantize.gptq import Compensation, round_in_turn


@dataclass(frozen=True, slots=True)
class Scales:
    """One for each block of rows and columns; the last blocks may be short."""

    values: Tensor  # [blocks of rows, blocks of columns] fp32
    block: tuple[int, int]

    @classmethod
    def fit(cls, weight: Tensor, block: tuple[int, int], dtype: torch.dtype) -> Scales:
        """For a matrix [N, K] fp32. They are rounded to the type that they are stored in."""
        rows, columns = weight.shape
        high, wide = min(block[0], rows), min(block[1], columns)
        padded = F.pad(weight, (0, -columns % wide, 0, -rows % high))
        blocks = padded.view(padded.shape[0] // high, high, padded.shape[1] // wide, wide)
        values = (blocks.abs().amax((1, 3)) / FP8_MAX).to(dtype).float()
        return cls(torch.where(values > 0, values, torch.ones_like(values)), (high, wide))

    def of_rows(self, rows: int) -> Tensor:
        """[blocks of columns, rows]: what each row's weights are divided by."""
        return self.values.repeat_interleave(self.block[0], 0)[:rows].t().contiguous()

    def matrix(self, codes: Tensor) -> Fp8Matrix:
        """The neutral form of e4m3 codes [N, K]."""
        return Fp8Matrix(codes.view(torch.uint8).numpy(), self.values.numpy(), self.block)


def quantize(weight: Tensor, block: tuple[int, int], scale_dtype: torch.dtype) -> Fp8Matrix:
    """A matrix [N, K] fp32, each weight at its nearest number."""
    scales = Scales.fit(weight, block, scale_dtype)
    parts = zip(torch.split(weight, scales.block[1], dim=1), scales.of_rows(len(weight)), strict=True)
    return scales.matrix(torch.cat([_nearest(part / scale[:, None]).view(torch.uint8) for part, scale in parts], 1))


def quantize_compensated(
    weight: Tensor, compensation: Compensation, block: tuple[int, int], scale_dtype: torch.dtype
) -> Fp8Matrix:
    """The same, but later columns make up for the error of those before, as in `gptq`."""
    scales = Scales.fit(weight, block, scale_dtype)
    of_rows = scales.of_rows(len(weight))
    columns = weight.t()[compensation.order].contiguous()  # [K, N], so that a column lies together
    codes = torch.empty(columns.shape, dtype=torch.float8_e4m3fn)
    places = compensation.order.tolist()

    def rounded(index: int, column: Tensor) -> Tensor:
        place = places[index]
        scale = of_rows[place // scales.block[1]]
        codes[place] = _nearest(column / scale)
        return codes[place].float().mul_(scale)

    round_in_turn(columns, compensation.factor, rounded)
    return scales.matrix(codes.t().contiguous())


def _nearest(scaled: Tensor) -> Tensor:
    return scaled.clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
