"""int4 weights times activations of 16 or 32 bits: codes become numbers of the activations' type on the way."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.device import gpu_of
from kernels.quant_matmul.triton_tiles import STEPWISE, empty_parts, join, place_of, plan_launch, store
from kernels.quant_matmul.weights import Int4Weight


@triton.jit
def widened(codes, scales, offsets, rows, k, row_count, column_count, group_size, OFFSETS: tl.constexpr,
            GROUPS: tl.constexpr, COMPUTE: tl.constexpr):  # fmt: skip
    """Numbers [rows, k] of codes; a step's columns are of one group (GROUPS 1) or of several."""
    if GROUPS == 1:
        at = (tl.min(k, 0) // group_size) * row_count + rows[:, None]
        mask = (rows < row_count)[:, None]
    else:
        at = (k // group_size)[None, :] * row_count + rows[:, None]
        mask = (rows < row_count)[:, None] & (k < column_count)[None, :]
    scale = tl.load(scales + at, mask=mask, other=0).to(tl.float32)
    if OFFSETS:
        numbers = codes.to(tl.float32) * scale + tl.load(offsets + at, mask=mask, other=0).to(tl.float32)
    else:
        numbers = (codes.to(tl.float32) - 8.0) * scale
    return numbers.to(COMPUTE)


@triton.jit
def sum_of_split(
    split, codes, scales, offsets, x, rows, tokens, row_count, token_count, column_count, stride_x, stride_codes,
    group_size, split_columns,
    OFFSETS: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """[ROWS, TOKENS] over the columns of one split."""
    # A step's bytes: 16 of each chunk of 32 columns, the first half of the chunk low, the second high.
    byte = tl.arange(0, COLUMNS // 2)
    low_column = byte // 16 * 32 + byte % 16
    from_codes = codes + rows[:, None].to(tl.int64) * stride_codes + byte[None, :]
    from_x = x + tokens[None, :].to(tl.int64) * stride_x
    is_row = (rows < row_count)[:, None]
    is_token = (tokens < token_count)[None, :]
    total = tl.zeros([ROWS, TOKENS], tl.float32)
    for start in range(split * split_columns, tl.minimum((split + 1) * split_columns, column_count), COLUMNS):
        pairs = tl.load(from_codes + start // 2, mask=is_row & (start // 2 + byte < stride_codes)[None, :], other=0)
        k = start + low_column
        low = tl.load(from_x + k[:, None], mask=is_token & (k < column_count)[:, None], other=0)
        high = tl.load(from_x + k[:, None] + 16, mask=is_token & (k + 16 < column_count)[:, None], other=0)
        first = widened(pairs & 15, scales, offsets, rows, k, row_count, column_count, group_size, OFFSETS, GROUPS,
                        x.dtype.element_ty)  # fmt: skip
        second = widened(pairs >> 4, scales, offsets, rows, k + 16, row_count, column_count, group_size, OFFSETS,
                         GROUPS, x.dtype.element_ty)  # fmt: skip
        total = tl.dot(first, low, total, input_precision=PRECISION)
        total = tl.dot(second, high, total, input_precision=PRECISION)
    return total


@triton.jit(do_not_specialize=STEPWISE)
def int4_kernel(
    out, parts, x, codes, scales, offsets, bias, row_count, token_count, column_count, stride_x, stride_codes,
    group_size, split_columns, splits, tiles,
    OFFSETS: tl.constexpr, GROUPS: tl.constexpr, MODE: tl.constexpr, BIAS: tl.constexpr, ROWS: tl.constexpr,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr, TOGETHER: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    row_tiles = tl.cdiv(row_count, ROWS)
    token_tiles = tl.cdiv(token_count, TOKENS)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row_tile, token_tile, split = place_of(tile, row_tiles, token_tiles, TOGETHER)
        rows = row_tile * ROWS + tl.arange(0, ROWS)
        tokens = token_tile * TOKENS + tl.arange(0, TOKENS)
        total = sum_of_split(
            split, codes, scales, offsets, x, rows, tokens, row_count, token_count, column_count, stride_x,
            stride_codes, group_size, split_columns, OFFSETS, GROUPS, ROWS, TOKENS, COLUMNS, PRECISION,
        )  # fmt: skip
        if MODE == "chain":
            for following in range(1, splits):
                total += sum_of_split(
                    following, codes, scales, offsets, x, rows, tokens, row_count, token_count, column_count, stride_x,
                    stride_codes, group_size, split_columns, OFFSETS, GROUPS, ROWS, TOKENS, COLUMNS, PRECISION,
                )  # fmt: skip
        store(out, parts, total, split, bias, scales, scales, rows, tokens, row_count, token_count, MODE == "part",
              BIAS, False, False)  # fmt: skip


def multiply(x: Tensor, weight: Int4Weight, bias: Tensor | None, fixed_split: int | None) -> Tensor:
    """As kernels.quant_matmul.multiply_int4, which has checked the arguments; x lies in the order of columns."""
    tokens, columns = x.shape
    out = torch.empty((tokens, weight.rows), dtype=x.dtype, device=x.device)
    if not tokens:
        return out
    gpu = gpu_of(x.device)
    step = 128 if tokens <= 16 and x.element_size() == 2 and fixed_split is None else 64
    launch = plan_launch("multiply_int4", tokens, weight.rows, columns, gpu, fixed_split, step=step)
    config = launch.config
    parts = empty_parts(out, launch, torch.float32)
    int4_kernel[(launch.programs,)](
        out, parts, x, weight.codes, weight.scales, weight.scales if weight.offsets is None else weight.offsets,
        out if bias is None else bias, weight.rows, tokens, columns, x.stride(0), weight.codes.stride(0),
        weight.group_size, launch.split_columns, launch.splits, launch.tiles,
        OFFSETS=weight.offsets is not None,
        GROUPS=1 if weight.group_size % config.columns == 0 or weight.group_size >= columns else 2,
        MODE=launch.mode, BIAS=bias is not None, ROWS=config.rows, TOKENS=config.tokens, COLUMNS=config.columns,
        TOGETHER=config.together, PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    if launch.mode == "part":
        join(out, parts, bias, None, None, launch.splits)
    return out
