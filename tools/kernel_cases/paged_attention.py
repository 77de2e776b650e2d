"""Attention over mixed batches: types, formats, options, ways to split."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernels.kv_write import NarrowBlocks
from kernels.paged_attention import AttentionRule, MixedBatch, PagedKv, mixed_attention


def cases() -> dict[str, Callable[[], object]]:
    bf16, fp16, fp8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
    return {
        "decode": lambda: attend(1, 4, 128, bf16),
        "decode, formats by age": lambda: attend(1, 4, 128, bf16, colder=("int8", "int4")),
        "prefill": lambda: attend(512, 4, 128, bf16),
        "prefill, fixed splits": lambda: attend(512, 4, 128, bf16, fixed_split=512),
        "decode, fixed splits": lambda: attend(1, 4, 128, bf16, fixed_split=512),
        "window, cap, sinks": lambda: attend(
            1, 4, 64, bf16, AttentionRule(1.0, 128, 30.0, torch.zeros(8)), fixed_split=512
        ),
        "fp8 blocks": lambda: attend(1, 4, 128, fp16, hot=fp8, colder=("fp8",)),
        "prefill, formats by age": lambda: attend(512, 4, 128, bf16, colder=("fp8", "int4")),
        "heads of 256": lambda: attend(512, 1, 256, bf16),
        "heads of 80, fp32": lambda: attend(16, 1, 80, torch.float32),
    }


def attend(
    queries: int,
    shared: int,
    width: int,
    dtype: torch.dtype,
    rule: AttentionRule | None = None,
    hot: torch.dtype | None = None,
    colder: tuple[str, ...] = (),
    fixed_split: int | None = None,
) -> None:
    size = (2, 16, 16, width)  # kv heads, blocks, block size
    cpu = torch.device("cpu")
    kv = PagedKv(
        torch.zeros(4, *size[1:], dtype=hot or dtype),
        [NarrowBlocks.zeros(format_, (1, *size), cpu).layer(0) for format_ in colder],
    )
    batch = MixedBatch(
        torch.tensor([0, queries], dtype=torch.int32),
        torch.tensor([queries], dtype=torch.int32),
        torch.zeros(1, 64, dtype=torch.int32),
        queries,
        8192,
    )
    mixed_attention(
        torch.zeros(queries, 2 * shared, width, dtype=dtype), kv, batch, rule or AttentionRule(1.0),
        fixed_split=fixed_split,
    )  # fmt: skip
