"""Matrices [N outputs, K inputs] as GPU kernels read them, and what they mean."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 32
"""Columns of an int4 row that lie in 16 bytes: byte j has column j low and column 16 + j high."""
SCALE_COLUMNS = 128
"""Scales of e4m3 weights that change within a row do so at multiples of it."""


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """value = code * scale + offset, both of the column's group."""

    codes: Tensor  # [N, ceil(K / 32) * 16] uint8
    scales: Tensor  # [G, N] fp32, fp16 or bf16
    offsets: Tensor | None  # [G, N] like scales: a minimum, or -zero * scale; None: -8 * scale
    columns: int  # K
    group_size: int  # columns, a multiple of 32, or K at least
    order: Tensor | None = None  # [K] int64: the input that each column multiplies (act-order); None: its own

    @property
    def rows(self) -> int:
        return len(self.codes)

    def dequantize(self) -> Tensor:
        """fp32 [N, K], columns in the order of the inputs."""
        chunks = self.codes.view(self.rows, -1, CHUNK // 2)
        codes = torch.cat((chunks & 15, chunks >> 4), 2).view(self.rows, -1)[:, : self.columns].float()
        groups = torch.arange(self.columns, device=codes.device) // self.group_size
        scales = self.scales.float()
        offsets = -8 * scales if self.offsets is None else self.offsets.float()
        values = codes * scales[groups].T + offsets[groups].T
        if self.order is None:
            return values
        turned = torch.empty_like(values)
        turned[:, self.order] = values
        return turned


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """value = code * scale of the row."""

    codes: Tensor  # [N, K] int8
    scales: Tensor  # [N] fp32

    def dequantize(self) -> Tensor:
        """fp32 [N, K]."""
        return self.codes.float() * self.scales[:, None]


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """value = number * scale of its block."""

    codes: Tensor  # [N, K] e4m3
    scales: Tensor  # fp32: [N], or [ceil(N / block rows), ceil(K / block columns)]
    block: tuple[int, int] | None = None  # None: a scale a row; a scale for all is one repeated

    def dequantize(self) -> Tensor:
        """fp32 [N, K]."""
        values = self.codes.float()
        if self.block is None:
            return values * self.scales[:, None]
        wide = self.scales.repeat_interleave(self.block[0], 0).repeat_interleave(self.block[1], 1)
        return values * wide[: values.shape[0], : values.shape[1]]


def pack_int4(
    codes: Tensor, scales: Tensor, offsets: Tensor | None, group_size: int, order: Tensor | None = None
) -> Int4Weight:
    """Packs codes uint8 [N, K] below 16 with scales and offsets [N, G]. ValueError where they do not fit each other.

    With `order` columns are already sorted by group.
    """
    rows, columns = codes.shape
    if group_size % CHUNK and group_size < columns:
        raise ValueError(f"int4 groups of {group_size} columns: only multiples of {CHUNK} are possible")
    expected = rows, -(-columns // group_size)
    if scales.shape != expected or (offsets is not None and offsets.shape != expected):
        raise ValueError(f"scales {list(scales.shape)} for {list(codes.shape)} in groups of {group_size}")
    padded = torch.nn.functional.pad(codes, (0, -columns % CHUNK)).view(rows, -1, 2, CHUNK // 2)
    packed = (padded[:, :, 0] | padded[:, :, 1] << 4).view(rows, -1)
    turned = None if offsets is None else offsets.T.contiguous()
    return Int4Weight(packed.contiguous(), scales.T.contiguous(), turned, columns, group_size, order)
