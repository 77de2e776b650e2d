"""How products are cut into tiles and splits, and how splits are joined; shared by all formats.

Tiles are [outputs, tokens]: matrices are the left operand, so that few tokens waste little of an instruction, and
weights that become numbers in registers need not go through shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.device import Gpu
from kernels.gpu.tuned import tuned

STEPWISE = ("token_count", "splits", "tiles")
"""Arguments that differ from step to step: compiled once, whatever they are, so that no step waits for a compiler."""


@triton.jit
def place_of(tile, row_tiles, token_tiles, TOGETHER: tl.constexpr):
    """Row tile, token tile and split of a number; neighbours share rows or tokens in the cache."""
    each = row_tiles * token_tiles
    split = tile // each
    rest = tile % each
    band = rest // (TOGETHER * token_tiles)
    first = band * TOGETHER
    height = tl.minimum(row_tiles - first, TOGETHER)
    inside = rest % (TOGETHER * token_tiles)
    return first + inside % height, inside // height, split


@triton.jit
def finish(total, bias, row_scales, token_scales, rows, tokens, row_count, token_count, BIAS: tl.constexpr,
           ROW_SCALED: tl.constexpr, TOKEN_SCALED: tl.constexpr):  # fmt: skip
    """Sums [rows, tokens] with what is the same along K: scales, then the bias. fp32."""
    total = total.to(tl.float32)
    if ROW_SCALED:
        total *= tl.load(row_scales + rows, mask=rows < row_count, other=0)[:, None]
    if TOKEN_SCALED:
        total *= tl.load(token_scales + tokens, mask=tokens < token_count, other=0)[None, :]
    if BIAS:
        total += tl.load(bias + rows, mask=rows < row_count, other=0).to(tl.float32)[:, None]
    return total


@triton.jit
def store(out, parts, total, split, bias, row_scales, token_scales, rows, tokens, row_count, token_count,
          SPLIT: tl.constexpr, BIAS: tl.constexpr, ROW_SCALED: tl.constexpr, TOKEN_SCALED: tl.constexpr):  # fmt: skip
    """Stores a tile into out [T, N], or its split's part as it is."""
    mask = (rows < row_count)[:, None] & (tokens < token_count)[None, :]
    at = tokens[None, :].to(tl.int64) * row_count + rows[:, None]
    if SPLIT:
        tl.store(parts + split.to(tl.int64) * token_count * row_count + at, total, mask=mask)
    else:
        total = finish(
            total, bias, row_scales, token_scales, rows, tokens, row_count, token_count, BIAS, ROW_SCALED, TOKEN_SCALED
        )  # fmt: skip
        tl.store(out + at, total.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["splits", "token_count"])
def join_kernel(out, parts, bias, row_scales, token_scales, splits, row_count, token_count, BIAS: tl.constexpr,
                ROW_SCALED: tl.constexpr, TOKEN_SCALED: tl.constexpr, N: tl.constexpr):  # fmt: skip
    """Adds the splits of N outputs of one token, in their order."""
    token = tl.program_id(0) + tl.arange(0, 1)
    rows = tl.program_id(1) * N + tl.arange(0, N)
    mask = (rows < row_count)[:, None]
    at = token[None, :].to(tl.int64) * row_count + rows[:, None]
    total = tl.load(parts + at, mask=mask, other=0)
    for split in range(1, splits):
        total += tl.load(parts + tl.cast(split, tl.int64) * token_count * row_count + at, mask=mask, other=0)
    total = finish(
        total, bias, row_scales, token_scales, rows, token, row_count, token_count, BIAS, ROW_SCALED, TOKEN_SCALED
    )  # fmt: skip
    tl.store(out + at, total.to(out.dtype.element_ty), mask=mask)


@dataclass(frozen=True, slots=True)
class Config:
    """What may be tuned without changing more than rounding."""

    rows: int  # outputs of a tile
    tokens: int
    columns: int  # of a step along K
    warps: int
    stages: int
    splits: int = 0  # along K; 0: as many as keep the GPU busy
    together: int = 8  # row tiles that follow each other


@dataclass(frozen=True, slots=True)
class Launch:
    """How a product is cut."""

    config: Config
    programs: int  # each takes every so many-th tile
    tiles: int
    split_columns: int
    splits: int
    mode: str  # "whole": one split; "part": a tile a split; "chain": a tile goes through all splits and adds them up


def plan_launch(
    kernel: str, tokens: int, rows: int, columns: int, gpu: Gpu, fixed_split: int | None, *, step: int
) -> Launch:
    """With `step` columns at a time, where no table says otherwise. With `fixed_split` the batch decides nothing.

    ValueError where that is no multiple of a step.
    """
    wide = 64 if fixed_split else min(128, max(16, triton.next_power_of_2(tokens)))
    default = Config(
        rows=64 if wide <= 16 or step < 64 else 128, tokens=wide, columns=step,
        warps=8 if wide >= 128 else 4, stages=3,
    )  # fmt: skip
    shape = {
        "tokens": 0 if fixed_split else tokens, "rows": rows, "columns": columns, "fixed": int(bool(fixed_split)),
    }  # fmt: skip
    config = tuned(kernel, gpu, default, shape)
    area = -(-tokens // config.tokens) * -(-rows // config.rows)
    steps = -(-columns // config.columns)
    if fixed_split:
        if fixed_split % config.columns:
            raise ValueError(f"splits of {fixed_split} columns are no multiples of {config.columns}")
        per_split = fixed_split // config.columns
    else:
        wanted = config.splits or max(1, min(2 * gpu.processors // area, 16))
        per_split = max(-(-steps // wanted), min(steps, 2))
    splits = max(1, -(-steps // per_split))
    # Where tiles alone keep the GPU busy, parts would only cost memory. The result is the same.
    mode = "whole" if splits == 1 else "part" if area < gpu.processors else "chain"
    tiles = area * splits if mode == "part" else area
    # Two programs a processor share it; more tiles than that wait for their turn inside a program.
    return Launch(config, min(tiles, 2 * gpu.processors), tiles, per_split * config.columns, splits, mode)


def join(
    out: Tensor, parts: Tensor, bias: Tensor | None, row_scales: Tensor | None, token_scales: Tensor | None, splits: int
) -> None:
    """Writes out [T, N] from parts [splits, T, N]."""
    tokens, rows = out.shape
    size = min(1024, triton.next_power_of_2(rows))
    join_kernel[(tokens, triton.cdiv(rows, size))](
        out, parts, _or(bias, out), _or(row_scales, out), _or(token_scales, out), splits, rows, tokens,
        BIAS=bias is not None, ROW_SCALED=row_scales is not None, TOKEN_SCALED=token_scales is not None, N=size,
        num_warps=4,
    )  # fmt: skip


def empty_parts(out: Tensor, launch: Launch, dtype: torch.dtype) -> Tensor:
    """Room for splits; none is needed where a tile has them all."""
    return out.new_empty((launch.splits, *out.shape), dtype=dtype) if launch.mode == "part" else out


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    return other if tensor is None else tensor
