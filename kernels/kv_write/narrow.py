"""Blocks of keys and values in int8, fp8 (e4m3) and int4.

Keys have a range per channel of a block, values one per token (KIVI).

Rounds as the native kernels do, so that both make the same numbers of the same input.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_STEPS = {"int8": 127, "fp8": 448, "int4": 15}


@dataclass(frozen=True, slots=True)
class NarrowBlocks:
    """A pool of blocks, of one layer (no L) or of all. T tokens a block, D channels, R is 2 for int4, else 1."""

    format: str
    # [L, 2 * heads, blocks, T, D] int8, keys first; fp8: bits, uint8; int4: [..., D / 2] uint8, i low, i + D / 2 high
    numbers: Tensor
    key_ranges: Tensor  # [L, heads, blocks, R, D] bf16: scales, then minima
    value_ranges: Tensor  # [L, heads, blocks, T, R] bf16: the same

    @classmethod
    def zeros(cls, format_: str, shape: tuple[int, int, int, int, int], device: torch.device) -> NarrowBlocks:
        """Of shape (layers, heads, blocks, T, D)."""
        layers, heads, blocks, tokens, width = shape
        kind = torch.int8 if format_ == "int8" else torch.uint8
        stored, ranges = (width // 2, 2) if format_ == "int4" else (width, 1)
        return cls(
            format_,
            torch.zeros(layers, 2 * heads, blocks, tokens, stored, dtype=kind, device=device),
            torch.zeros(layers, heads, blocks, ranges, width, dtype=torch.bfloat16, device=device),
            torch.zeros(layers, heads, blocks, tokens, ranges, dtype=torch.bfloat16, device=device),
        )

    @property
    def nbytes(self) -> int:
        return self.numbers.nbytes + self.key_ranges.nbytes + self.value_ranges.nbytes

    def layer(self, index: int) -> NarrowBlocks:
        """A view of one layer."""
        return NarrowBlocks(self.format, self.numbers[index], self.key_ranges[index], self.value_ranges[index])

    def read(self, blocks: Tensor) -> Tensor:
        """Keys and values [L, 2 * heads, n, T, D] of blocks [n] as fp32."""
        parts = (self.numbers, self.key_ranges, self.value_ranges)
        numbers, key_ranges, value_ranges = (part.index_select(-3, blocks) for part in parts)
        if self.format == "int4":
            numbers = torch.cat((numbers & 15, numbers >> 4), -1)
        elif self.format == "fp8":
            numbers = numbers.view(torch.float8_e4m3fn)
        keys, values = numbers.float().chunk(2, -4)
        return torch.cat((_widen(keys, key_ranges.float(), -2), _widen(values, value_ranges.float(), -1)), -4)

    def write(self, block: int, keys_values: Tensor) -> None:
        """Rounds keys and values [L, 2 * heads, T, D] into one block."""
        keys, values = keys_values.float().chunk(2, -3)
        parts = [quantize(keys, self.format, -2), quantize(values, self.format, -1)]
        numbers = torch.cat([part[0] for part in parts], -3)
        if self.format == "int4":
            low, high = numbers.chunk(2, -1)
            numbers = low | high << 4
        self.numbers.select(-3, block).copy_(numbers)
        self.key_ranges.select(-3, block).copy_(parts[0][1])
        self.value_ranges.select(-3, block).copy_(parts[1][1])


def quantize(x: Tensor, format_: str, dim: int) -> tuple[Tensor, Tensor]:
    """x = scale * number + minimum: numbers (int8, uint8 or e4m3's bits) shaped like x fp32, and ranges [..., R, ...]
    along `dim`.

    Scale and minimum are bf16, rounded so that the range still spans all of x; only int4 has a minimum.
    """
    if format_ != "int4":
        minimum, reach, least = None, x.abs().amax(dim, keepdim=True), -_STEPS[format_]
    else:
        lowest = x.amin(dim, keepdim=True) + 0.0  # a zero is positive
        minimum, least = torch.where(lowest < 0, _away(lowest), _towards(lowest)), 0
        reach, x = x.amax(dim, keepdim=True) - minimum, x - minimum
    steps = _STEPS[format_]
    scale = _away(reach / torch.full_like(reach, steps))
    ranges = scale if minimum is None else torch.cat((scale, minimum), dim)
    numbers = x / scale.where(scale > 0, 1)
    if format_ == "fp8":
        return numbers.clamp_(least, steps).to(torch.float8_e4m3fn).view(torch.uint8), ranges
    numbers = numbers.round_().clamp_(least, steps).where(scale > 0, 0)
    return numbers.to(torch.int8 if minimum is None else torch.uint8), ranges


def _widen(numbers: Tensor, ranges: Tensor, dim: int) -> Tensor:
    if ranges.shape[dim] == 1:
        return numbers * ranges
    scale, minimum = ranges.chunk(2, dim)
    return numbers * scale + minimum


def _away(x: Tensor) -> Tensor:
    """fp32 rounded to bf16, away from zero."""
    return ((x.contiguous().view(torch.int32) + 0xFFFF) & ~0xFFFF).view(torch.float32)


def _towards(x: Tensor) -> Tensor:
    """fp32 rounded to bf16, towards zero."""
    return (x.contiguous().view(torch.int32) & ~0xFFFF).view(torch.float32)
