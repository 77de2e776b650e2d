"""How far native results may lie from exact ones, by format. Every test of native code takes its budget from here."""

from __future__ import annotations

MATMUL = {"f32": 5e-7, "bf16": 5e-7, "q8": 2e-7, "q8c": 2e-7, "q4g": 2e-7, "q4m": 5e-7, "q4z": 2e-7, "q4k": 5e-7,
          "q6k": 2e-7, "f8": 5e-7}  # fmt: skip
"""Largest error of an output against the reference of its format, as a share of the sum of its products' magnitudes."""

LOGITS = {"f32": 1e-5, "bf16": 1e-5, "f8": 1e-5, "q8": 2e-4, "q6k": 2e-4, "q8c": 2e-2, "q4g": 2e-2, "q4m": 2e-2,
          "q4z": 2e-2, "q4k": 2e-2, "bf16 products": 5e-2}  # fmt: skip
"""Relative L2 error of logits against float64 on the same dequantized weights and the same rounding of what matrices
multiply. Where that is rounded, some values fall to the other side, for they came out a little differently. What
bf16 products round is not scaled by its norm yet, so the reference rounds other values than they."""

KV = {"f32": 3e-5, "bf16": 1e-2, "int8": 2e-2, "int4": 0.25, "rounded": 1e-3, "rounded twice": 1e-2}
"""Relative L2 error of logits where the keys and values that they see are of a format; `rounded`: against a reference
that rounds them in the same way; twice: int8 numbers that lie halfway between int4 steps fall to either side."""

LOGIT = 5e-4
"""Largest difference of one logit between the native code and torch, both in fp32; logits reach about 10."""

LOGPROB = 5e-4
"""The same for log probabilities."""


def of(budgets: dict[str, float], format_: str) -> float:
    """The budget of a packed format; 4-bit ones of all group sizes share theirs."""
    return budgets[format_ if format_ in budgets else format_[:3]]
