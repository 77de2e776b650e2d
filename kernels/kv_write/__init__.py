"""Writes keys and values into paged memory."""

from kernels.kv_write.reference import kv_write

__all__ = ["kv_write"]
