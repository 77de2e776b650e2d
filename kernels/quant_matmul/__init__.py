"""Products with quantized matrices on a GPU: activations x [T, K] times the transposed matrix [N, K]."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.activations import Quantized
from kernels.quant_matmul.weights import SCALE_COLUMNS, Fp8Weight, Int4Weight, Int8Weight, pack_int4

__all__ = [
    "Fp8Weight",
    "Int4Weight",
    "Int8Weight",
    "multiply_fp8",
    "multiply_int4",
    "multiply_int8",
    "multiply_plain",
    "pack_int4",
]


def multiply_int4(
    x: Tensor, weight: Int4Weight, bias: Tensor | None = None, *, fixed_split: int | None = None
) -> Tensor:
    """x [T, K] (fp32, fp16, bf16) by int4 weights, to [T, N] of x's type; weights are rounded to it.

    The sum over K is cut into parts that are added in their order: as many as the batch wants, or one for each
    `fixed_split` columns (a multiple of 128); then a row's bits depend on that row alone.
    """
    _check(x, weight.columns, bias, weight.rows)
    from kernels.quant_matmul import triton_int4

    if weight.order is not None:
        x = x.index_select(1, weight.order)
    return triton_int4.multiply(x, weight, bias, fixed_split)


def multiply_int8(
    x: Quantized, weight: Int8Weight, dtype: torch.dtype, bias: Tensor | None = None, *, fixed_split: int | None = None
) -> Tensor:
    """int8 rows by int8 weights, summed exactly, to [T, N] of `dtype`. `fixed_split` as of multiply_int4."""
    _check(x.codes, weight.codes.shape[1], bias, len(weight.codes))
    if x.codes.dtype != torch.int8 or x.scales.dim() != 1:
        raise ValueError(f"multiply_int8 of {x.codes.dtype} with scales {list(x.scales.shape)}")
    from kernels.quant_matmul import triton_impl

    return triton_impl.multiply(x, weight, dtype, bias, fixed_split)


def multiply_fp8(
    x: Quantized, weight: Fp8Weight, dtype: torch.dtype, bias: Tensor | None = None, *, fixed_split: int | None = None
) -> Tensor:
    """e4m3 rows by e4m3 weights to [T, N] of `dtype`; GPUs without e4m3 multiply the same numbers as fp16.

    Blocks of weights have any number of rows, and multiples of 128 columns. `fixed_split` as of multiply_int4.
    """
    _check(x.codes, weight.codes.shape[1], bias, len(weight.codes))
    if x.codes.dtype != torch.float8_e4m3fn:
        raise ValueError(f"multiply_fp8 of {x.codes.dtype}")
    if weight.block is not None and weight.block[1] % SCALE_COLUMNS and weight.block[1] < weight.codes.shape[1]:
        raise ValueError(f"multiply_fp8 by blocks of {weight.block}: columns are no multiple of {SCALE_COLUMNS}")
    from kernels.quant_matmul import triton_impl

    return triton_impl.multiply(x, weight, dtype, bias, fixed_split)


def multiply_plain(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, fixed_split: int | None = None) -> Tensor:
    """x [T, K] by weights [N, K] of the same type: where bits may not depend on the batch, as cuBLAS' do."""
    _check(x, weight.shape[1], bias, len(weight))
    if x.dtype != weight.dtype or not weight.is_contiguous():
        raise ValueError(f"multiply_plain of {x.dtype} by {weight.dtype}, {weight.stride()}")
    from kernels.quant_matmul import triton_impl

    return triton_impl.multiply(x, weight, x.dtype, bias, fixed_split)


def _check(x: Tensor, columns: int, bias: Tensor | None, rows: int) -> None:
    if x.dim() != 2 or x.shape[1] != columns or x.stride(1) != 1:
        raise ValueError(f"a product of {list(x.shape)}, strides {x.stride()}, by a matrix of {columns} columns")
    if bias is not None and bias.shape != (rows,):
        raise ValueError(f"a product by {rows} rows with a bias {list(bias.shape)}")
