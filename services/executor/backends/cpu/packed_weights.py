"""A model's weights in the form that the native kernels read: one buffer and a table of contents.

Matrices: `embedding`, `head` (the embedding itself where tied), and per layer `layers.N.` with `q`, `k`, `v`, `o`,
`gate_up`, `down`. Vectors, fp32 in the row order of their matrix and padded with zeros: `final_norm`, and per layer
`attention_norm`, `mlp_norm`, `qkv_bias` (q, k, v one after the other), `o_bias`, `gate_up_bias`, `down_bias`. Where the
columns of matrices are not in the order of their inputs, int32 vectors say which input each multiplies (-1: none):
`head_order`, and per layer `qkv_order`, `o_order`, `gate_up_order`, `down_order`.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from services.executor.models.weights import Bytes


class PackedMatrix(NamedTuple):
    """Where a matrix lies and how; exactly what the native program takes."""

    format: int  # a value of FORMATS
    rows: int  # padded to whole panels
    k: int  # padded
    offset: int  # bytes into the buffer, a multiple of 64


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """Read-only. The buffer starts at a multiple of 64."""

    buffer: Bytes
    matrices: Mapping[str, PackedMatrix]
    vectors: Mapping[str, int]  # byte offsets into the buffer, multiples of 64
    formats: str  # how many matrices have which format, for people and the fingerprint: "q4mg32 x 180, q8 x 1"
    conversions: tuple[str, ...]  # what is not held as the file has it, for the log
    source_digests: tuple[str, ...]  # hex SHA-256 of the checkpoint's files, in their order
    mapped_bytes: int  # of the buffer that lie in the page cache, which the system counts as free memory

    def in_own_memory(self) -> PackedWeights:
        """A copy on the NUMA node that memory comes from now, wherever the pages of a mapped file lie."""
        buffer = own_memory(self.buffer.nbytes)
        buffer[:] = self.buffer
        buffer.flags.writeable = False
        return replace(self, buffer=buffer, mapped_bytes=0)

    def matrix(self, name: str) -> PackedMatrix:
        """The named matrix; KeyError where the model has none."""
        return self.matrices[name]

    def vector(self, name: str) -> int:
        """Byte offset of the named vector, -1 where the model has none."""
        return self.vectors.get(name, -1)


def own_memory(size: int) -> Bytes:
    """Zeros that no other process shares, in huge pages where there are such; they start at a page's start."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # not every kernel has huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)
