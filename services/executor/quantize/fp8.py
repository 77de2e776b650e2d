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
    spread = scales.of_rows(len(weight)).repeat_interleave(scales.block[1], 0)[: weight.shape[1]].t()
    return scales.matrix(_nearest(weight / spread))


def quantize_compensated(
    weight: Tensor, compensation: Compensation, block: tuple[int, int], scale_dtype: torch.dtype
) -> Fp8Matrix:
    """The same, but later columns make up for the error of those before, as in `gptq`."""
    scales = Scales.fit(weight, block, scale_dtype)
    of_rows = scales.of_rows(len(weight))
    order = compensation.order
    columns = weight.t()[order].contiguous()
    codes = torch.empty(columns.shape, dtype=torch.float8_e4m3fn)
    own = (order // scales.block[1]).tolist()

    def rounded(index: int, column: Tensor) -> Tensor:
        scale = of_rows[own[index]]
        codes[index] = _nearest(column / scale)
        return codes[index].float().mul_(scale)

    round_in_turn(columns, compensation.factor, rounded)
    return scales.matrix(codes.view(torch.uint8)[torch.argsort(order)].t().contiguous())


def _nearest(scaled: Tensor) -> Tensor:
    return scaled.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
