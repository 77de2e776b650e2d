"""Products of two operands of one format: int8 (exact sums), e4m3 with scales of any kind, plain numbers.

On GPUs without e4m3, codes become fp16, which holds them exactly. With it, instructions keep fewer bits of a sum than
fp32 has, so sums over a step are added in fp32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.activations import Quantized
from kernels.gpu.device import Gpu, gpu_of
from kernels.gpu.numbers import e4m3_values
from kernels.quant_matmul.triton_tiles import STEPWISE, empty_parts, join, place_of, plan_launch, store
from kernels.quant_matmul.weights import SCALE_COLUMNS, Fp8Weight, Int8Weight


@triton.jit
def sum_of_split(
    split, x, weight, x_scales, weight_scales, rows, tokens, row_count, token_count, column_count, stride_x,
    block_rows, block_columns, scale_columns, x_groups, split_columns,
    KIND: tl.constexpr, BLOCKED: tl.constexpr, X_GROUPED: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """[ROWS, TOKENS] over the columns of one split, with scales that change within a row."""
    column = tl.arange(0, COLUMNS)
    is_row = rows < row_count
    is_token = tokens < token_count
    from_weight = weight + rows[:, None].to(tl.int64) * column_count
    from_x = x + tokens[None, :].to(tl.int64) * stride_x
    if KIND == "int8":
        total = tl.zeros([ROWS, TOKENS], tl.int32)
    else:
        total = tl.zeros([ROWS, TOKENS], tl.float32)
    for start in range(split * split_columns, tl.minimum((split + 1) * split_columns, column_count), COLUMNS):
        k = start + column
        left = tl.load(from_weight + k[None, :], mask=is_row[:, None] & (k < column_count)[None, :], other=0.0)
        right = tl.load(from_x + k[:, None], mask=is_token[None, :] & (k < column_count)[:, None], other=0.0)
        if KIND == "e4m3 as fp16":
            left = e4m3_values(left, False)
            right = e4m3_values(right, False)
        if KIND == "int8":
            total = tl.dot(left, right, total, out_dtype=tl.int32)
        elif BLOCKED or X_GROUPED:
            part = tl.dot(left, right, input_precision=PRECISION)
            if BLOCKED:
                at = rows // block_rows * scale_columns + start // block_columns
                part *= tl.load(weight_scales + at, mask=is_row, other=0)[:, None]
            if X_GROUPED:
                part *= tl.load(x_scales + tokens * x_groups + start // 128, mask=is_token, other=0)[None, :]
            total += part
        elif KIND == "e4m3":
            total = tl.dot(left, right, total, max_num_imprecise_acc=COLUMNS)
        else:
            total = tl.dot(left, right, total, input_precision=PRECISION)
    return total


@triton.jit(do_not_specialize=STEPWISE)
def product_kernel(
    out, parts, x, weight, x_scales, weight_scales, bias, row_count, token_count, column_count, stride_x,
    block_rows, block_columns, scale_columns, x_groups, split_columns, splits, tiles,
    KIND: tl.constexpr, BLOCKED: tl.constexpr, X_GROUPED: tl.constexpr, MODE: tl.constexpr, BIAS: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, TOGETHER: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    row_tiles = tl.cdiv(row_count, ROWS)
    token_tiles = tl.cdiv(token_count, TOKENS)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row_tile, token_tile, split = place_of(tile, row_tiles, token_tiles, TOGETHER)
        rows = row_tile * ROWS + tl.arange(0, ROWS)
        tokens = token_tile * TOKENS + tl.arange(0, TOKENS)
        total = sum_of_split(
            split, x, weight, x_scales, weight_scales, rows, tokens, row_count, token_count, column_count, stride_x,
            block_rows, block_columns, scale_columns, x_groups, split_columns, KIND, BLOCKED, X_GROUPED, ROWS, TOKENS,
            COLUMNS, PRECISION,
        )  # fmt: skip
        if MODE == "chain":
            for following in range(1, splits):
                total += sum_of_split(
                    following, x, weight, x_scales, weight_scales, rows, tokens, row_count, token_count, column_count,
                    stride_x, block_rows, block_columns, scale_columns, x_groups, split_columns, KIND, BLOCKED,
                    X_GROUPED, ROWS, TOKENS, COLUMNS, PRECISION,
                )  # fmt: skip
        store(out, parts, total, split, bias, weight_scales, x_scales, rows, tokens, row_count, token_count,
              MODE == "part", BIAS, KIND != "plain" and not BLOCKED, KIND != "plain" and not X_GROUPED)  # fmt: skip


def multiply(
    x: Quantized | Tensor,
    weight: Int8Weight | Fp8Weight | Tensor,
    dtype: torch.dtype,
    bias: Tensor | None,
    fixed_split: int | None,
    gpu: Gpu | None = None,
) -> Tensor:
    """As multiply_int8, multiply_fp8 and multiply_plain of kernels.quant_matmul, which have checked the arguments."""
    left, row_scales = (weight, None) if isinstance(weight, torch.Tensor) else (weight.codes, weight.scales)
    right, token_scales = (x, None) if isinstance(x, torch.Tensor) else (x.codes, x.scales)
    (tokens, columns), rows = right.shape, len(left)
    out = torch.empty((tokens, rows), dtype=dtype, device=right.device)
    if not tokens:
        return out
    gpu = gpu or gpu_of(right.device)
    kind = "plain" if row_scales is None else "int8" if left.dtype == torch.int8 else "e4m3"
    step = (32 if left.dtype == torch.float32 else 64) if kind == "plain" else 128
    if kind == "e4m3" and not gpu.has_fp8:
        kind, left, right, step = "e4m3 as fp16", left.view(torch.uint8), right.view(torch.uint8), 64
    launch = plan_launch(f"multiply_{kind.split()[0]}", tokens, rows, columns, gpu, fixed_split, step=step)
    config = launch.config
    block = weight.block if isinstance(weight, Fp8Weight) else None
    grouped = token_scales is not None and token_scales.dim() == 2
    if (block or grouped) and SCALE_COLUMNS % config.columns:
        raise ValueError(f"steps of {config.columns} columns cross scales of {SCALE_COLUMNS}")
    parts = empty_parts(out, launch, torch.int32 if kind == "int8" else torch.float32)
    product_kernel[(launch.programs,)](
        out, parts, right, left, out if token_scales is None else token_scales,
        out if row_scales is None else row_scales, out if bias is None else bias,
        rows, tokens, columns, right.stride(0), block[0] if block else 1, block[1] if block else 1,
        row_scales.shape[1] if block and row_scales is not None else 1,
        token_scales.shape[1] if grouped and token_scales is not None else 1, launch.split_columns, launch.splits,
        launch.tiles,
        KIND=kind, BLOCKED=block is not None, X_GROUPED=grouped, MODE=launch.mode, BIAS=bias is not None,
        ROWS=config.rows, TOKENS=config.tokens, COLUMNS=config.columns, TOGETHER=config.together,
        PRECISION="ieee" if left.dtype == torch.float32 else "tf32",
        num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    if launch.mode == "part":
        join(out, parts, bias, None if block else row_scales, None if grouped else token_scales, launch.splits)
    return out
