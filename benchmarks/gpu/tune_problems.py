"""What is tuned: products of an 8B model and attention, from one token to many."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch

from benchmarks.gpu.models import int4_matrix
from benchmarks.gpu.setting import Setting
from benchmarks.gpu.time_kernels import HEADS, HIDDEN, INNER, KV_HEADS, WIDTH, paged
from benchmarks.gpu.tune import Problem, combinations
from kernels.activations import ActivationFormat, quantize, quantize_plainly
from kernels.paged_attention import AttentionRule, mixed_attention
from kernels.quant_matmul import Fp8Weight, Int8Weight, multiply_fp8, multiply_int4, multiply_int8

TOKENS = ((1, 1), (2, 16), (17, 64), (65, 256), (257, 1 << 20))
"""Ranges that share a configuration; the upper end is measured, but no more than 2,048."""
MOST_TOKENS = 2048


def problems(setting: Setting) -> Iterator[Problem]:
    """The most important first: few tokens, where matrices alone are read."""
    hidden, inner = setting.sized(HIDDEN, 64), setting.sized(INNER, 96)
    keys = 2 * KV_HEADS * WIDTH if setting.scale == 1 else 32
    shapes = ((2 * inner, hidden), (hidden, inner), (hidden + keys, hidden), (hidden, hidden))
    for low, high in TOKENS:
        for rows, columns in shapes:
            yield from _products(setting, low, high, rows, columns)
    yield from _attention(setting)


def _products(setting: Setting, low: int, high: int, rows: int, columns: int) -> Iterator[Problem]:
    tokens = setting.sized(min(high, MOST_TOKENS))
    weight = torch.randn(rows, columns, device=setting.place).to(setting.torch_dtype)
    x = torch.randn(tokens, columns, device=setting.place).to(setting.torch_dtype)
    shape: Mapping[str, int | list[int]] = {"tokens": [low, high], "rows": rows, "columns": columns}
    int4 = int4_matrix(weight).weight
    as_int8, as_fp8 = (quantize(x, ActivationFormat(kind)) for kind in ("int8", "fp8"))
    int8, fp8 = (quantize_plainly(weight.float(), kind) for kind in ("int8", "fp8"))
    runs: dict[str, Callable[[], object]] = {
        "multiply_int4": lambda: multiply_int4(x, int4),
        "multiply_int8": lambda: multiply_int8(as_int8, Int8Weight(*int8), setting.torch_dtype),
    }
    if setting.has_fp8:  # else it is another kernel's work
        runs["multiply_e4m3"] = lambda: multiply_fp8(as_fp8, Fp8Weight(*fp8), setting.torch_dtype)
    for kernel, run in runs.items():
        yield Problem(kernel, shape, run, _product_configs(tokens))


def _product_configs(tokens: int) -> Sequence[Mapping[str, int]]:
    if tokens <= 16:
        return combinations(rows=[32, 64, 128], columns=[64, 128], warps=[4, 8], stages=[3, 5], splits=[0, 4])
    wide = [64] if tokens <= 64 else [128, 256]
    return combinations(rows=[64, 128], tokens=wide, columns=[64, 128], warps=[4, 8], stages=[3, 4])


def _attention(setting: Setting) -> Iterator[Problem]:
    heads, kv_heads = (HEADS, KV_HEADS) if setting.scale == 1 else (4, 2)
    width, shared = setting.sized(WIDTH, 16), heads // kv_heads
    for queries, sequences, context in ((1, 64, 4096), (4, 32, 4096), (2048, 1, 4096)):
        queries, sequences, context = setting.sized(queries), setting.sized(sequences), setting.sized(context, 32)
        kv, batch = paged(setting, sequences, queries, context, kv_heads, width)
        q = torch.randn(sequences * queries, heads, width, device=setting.place).to(setting.torch_dtype)
        rule = AttentionRule(width**-0.5)
        rows = min(queries * shared, 64)
        configs = combinations(tile=[32, 64, 128], warps=[4, 8], stages=[2, 3, 4])
        if rows == 64:
            configs += combinations(rows=[128], tile=[32, 64, 128], warps=[4, 8], stages=[2, 3])
        shape = {"head_size": width, "shared": shared, "rows": rows, "fixed": 0}
        yield Problem("paged_attention", shape, partial(mixed_attention, q, kv, batch, rule), configs)
