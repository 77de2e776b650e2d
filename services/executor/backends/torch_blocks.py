"""Blocks of a torch pool as plain bytes: all its tensors' shares of the block, one behind the other.

Used beside steps from other threads. On a CPU numpy copies, without the GIL and without torch's compute threads; on a
GPU a stream of its own does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class BlockBytes:
    """Reads and writes blocks of one pool."""

    def __init__(self, tensors: Sequence[Tensor], follow: Callable[[], None] = lambda: None) -> None:
        """Contiguous [A, B, blocks, C, D] of any types. `follow` has the current stream wait for steps under way."""
        self._follow = follow
        self._parts = [_bytes_of(tensor) for tensor in tensors]
        self.block_bytes = sum(part.shape[0] * part.shape[2] for part in self._parts)
        self._device = tensors[0].device
        self._arrays = [part.numpy() for part in self._parts] if self._device.type == "cpu" else []
        is_cuda = self._device.type == "cuda"
        self._stream = torch.cuda.Stream(self._device) if is_cuda else None  # type: ignore[no-untyped-call]
        self._lock = threading.Lock()  # of the stream

    def read(self, place: int) -> memoryview:
        """A copy of the block."""
        if self._stream is None:
            block = np.empty(self.block_bytes, np.uint8)
            for array, share in zip(self._arrays, self._shares(block), strict=True):
                share[:] = array[:, place]
            return block.data
        with self._lock, torch.cuda.stream(self._stream):
            self._follow()
            found = torch.cat([part[:, place].flatten() for part in self._parts]).cpu()
        return found.numpy().data

    def write(self, place: int, block: memoryview) -> None:
        """Raises ValueError where the size is another."""
        if block.nbytes != self.block_bytes:
            raise ValueError(f"a block has {self.block_bytes} bytes, not {block.nbytes}")
        if self._stream is None:
            for array, bytes_ in zip(self._arrays, self._shares(np.frombuffer(block, np.uint8)), strict=True):
                array[:, place] = bytes_
            return
        with self._lock, torch.cuda.stream(self._stream):
            self._follow()
            taken = torch.frombuffer(bytearray(block), dtype=torch.uint8).to(self._device)
            sizes = [part.shape[0] * part.shape[2] for part in self._parts]
            for part, share in zip(self._parts, torch.split(taken, sizes), strict=True):
                part[:, place] = share.view(part.shape[0], part.shape[2])
            self._stream.synchronize()

    def _shares(self, block: NDArray[np.uint8]) -> Iterator[NDArray[np.uint8]]:
        start = 0
        for part in self._parts:
            end = start + part.shape[0] * part.shape[2]
            yield block[start:end].reshape(part.shape[0], part.shape[2])
            start = end


def _bytes_of(tensor: Tensor) -> Tensor:
    """uint8 [A * B, blocks, bytes], the same memory."""
    first, second, blocks, third, fourth = tensor.shape
    return tensor.view(first * second, blocks, third * fourth).view(torch.uint8)
