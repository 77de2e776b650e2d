"""Attention of a flattened batch, prefill chunks and decodes alike, over paged keys and values."""

from kernels.paged_attention.plan import AttentionPlan, plan_attention
from kernels.paged_attention.reference import paged_attention

__all__ = ["AttentionPlan", "paged_attention", "plan_attention"]
