"""Attention of a flattened batch, prefill chunks and decodes alike, over paged keys and values."""

from __future__ import annotations

from torch import Tensor

from kernels.paged_attention.mixed import AttentionRule, MixedBatch, PagedKv, check
from kernels.paged_attention.plan import AttentionPlan, plan_attention
from kernels.paged_attention.reference import paged_attention

__all__ = [
    "AttentionPlan",
    "AttentionRule",
    "MixedBatch",
    "PagedKv",
    "mixed_attention",
    "paged_attention",
    "plan_attention",
]


def mixed_attention(
    queries: Tensor,
    kv: PagedKv,
    batch: MixedBatch,
    rule: AttentionRule,
    *,
    fixed_split: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Causal attention of queries [T, heads, D] (fp32, fp16, bf16) over a layer's blocks, to [T, heads * D], on a GPU.

    A context is read in parts that are merged by log-sum-exp. Which parts is chosen by the batch, or they are multiples
    of `fixed_split` tokens: then a row's bits depend on its own context alone. Rows that no sequence has are zero, or
    as they were in `out`. ValueError where the parts do not fit each other.
    """
    check(queries, kv, batch, rule)
    if out is None:
        out = queries.new_zeros(queries.shape[0], queries.shape[1] * queries.shape[2])
    elif out.shape != (queries.shape[0], queries.shape[1] * queries.shape[2]) or not out.is_contiguous():
        raise ValueError(f"attention of queries {list(queries.shape)} into {list(out.shape)}")
    from kernels.paged_attention import triton_impl

    triton_impl.mixed_attention(queries, kv, batch, rule, fixed_split, out)
    return out
