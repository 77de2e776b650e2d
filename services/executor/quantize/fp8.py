"""Rounding to e4m3: one scale a matrix, a row or a block brings its largest weight to the largest number."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from services.executor.quant.matrix import FP8_MAX, Fp8Matrix


def quantize(weight: Tensor, block: tuple[int, int], scale_dtype: torch.dtype) -> Fp8Matrix:
    """A matrix [N, K] fp32 with a scale per block of rows and columns; the last ones may be short.

    Scales are rounded to the type that they are stored in before the weights are divided by them.
    """
    rows, columns = weight.shape
    high, wide = min(block[0], rows), min(block[1], columns)
    padded = F.pad(weight, (0, -columns % wide, 0, -rows % high))
    blocks = padded.view(padded.shape[0] // high, high, padded.shape[1] // wide, wide)
    scales = (blocks.abs().amax((1, 3)) / FP8_MAX).to(scale_dtype).float()
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))
    scaled = (blocks / scales[:, None, :, None]).clamp_(-FP8_MAX, FP8_MAX).view(padded.shape)[:rows, :columns]
    codes = scaled.to(torch.float8_e4m3fn).view(torch.uint8)
    return Fp8Matrix(codes.numpy(), scales.numpy(), (high, wide))
