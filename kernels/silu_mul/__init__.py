"""The gate of a gated MLP."""

from kernels.silu_mul.reference import silu_mul

__all__ = ["silu_mul"]
