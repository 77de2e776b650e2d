"""Products with quantized matrices, for few tokens and many."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernels.activations import Quantized
from kernels.quant_matmul import (
    Fp8Weight,
    Int8Weight,
    multiply_fp8,
    multiply_int4,
    multiply_int8,
    multiply_plain,
    pack_int4,
)

ROWS, COLUMNS = 256, 4096
bf16 = torch.bfloat16


def cases() -> dict[str, Callable[[], object]]:
    found: dict[str, Callable[[], object]] = {}
    for tokens in (1, 16, 64, 1024):
        for group, has_offsets in ((32, True), (128, True), (128, False)):
            found[f"int4 {group} {has_offsets}, {tokens}"] = lambda t=tokens, g=group, o=has_offsets: int4(t, g, o)  # type: ignore[misc]
        found[f"int8, {tokens}"] = lambda t=tokens: int8(t)  # type: ignore[misc]
        found[f"fp8, {tokens}"] = lambda t=tokens: fp8(t, None)  # type: ignore[misc]
        found[f"fp8 in blocks, {tokens}"] = lambda t=tokens: fp8(t, (128, 128))  # type: ignore[misc]
    for tokens in (16, 8192):
        found[f"plain, fixed splits, {tokens}"] = lambda t=tokens: multiply_plain(  # type: ignore[misc]
            torch.zeros(t, COLUMNS, dtype=bf16), torch.zeros(ROWS, COLUMNS, dtype=bf16), fixed_split=1024
        )
    return found


def int4(tokens: int, group: int, has_offsets: bool) -> None:
    scales = torch.ones(ROWS, COLUMNS // group, dtype=torch.float16)
    codes = torch.zeros(ROWS, COLUMNS, dtype=torch.uint8)
    weight = pack_int4(codes, scales, scales if has_offsets else None, group)
    multiply_int4(torch.zeros(tokens, COLUMNS, dtype=bf16), weight)


def int8(tokens: int) -> None:
    codes = torch.zeros(max(tokens, ROWS), COLUMNS, dtype=torch.int8)
    scales = torch.ones(len(codes))
    multiply_int8(Quantized(codes[:tokens], scales[:tokens]), Int8Weight(codes[:ROWS], scales[:ROWS]), bf16)


def fp8(tokens: int, block: tuple[int, int] | None) -> None:
    codes = torch.zeros(max(tokens, ROWS), COLUMNS).to(torch.float8_e4m3fn)
    scales = torch.ones(len(codes), COLUMNS // 128)
    if block is None:
        x, weight = (
            Quantized(codes[:tokens], scales[:tokens, 0].contiguous()),
            Fp8Weight(codes[:ROWS], scales[:ROWS, 0]),
        )
    else:
        x, weight = Quantized(codes[:tokens], scales[:tokens]), Fp8Weight(codes[:ROWS], scales[:2], block)
    multiply_fp8(x, weight, bf16)
