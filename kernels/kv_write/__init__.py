"""Writes keys and values into paged memory, and rewrites full blocks in narrower formats."""

from kernels.kv_write.narrow import NarrowBlocks
from kernels.kv_write.reference import kv_write

__all__ = ["NarrowBlocks", "kv_write"]
