"""Whole blocks on a GPU: copied, packed for another tier and back, rewritten in a colder format."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.kv_blocks.waves import waves
from kernels.kv_write import NarrowBlocks

__all__ = ["copy_blocks", "demote_blocks", "load_blocks", "offload_blocks", "pack_blocks", "unpack_blocks", "waves"]


def copy_blocks(pool: Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """Copies blocks (source, destination) of a pool [layers, 2 * kv heads, blocks, block size, D], as if in order."""
    parts = _parts([pool])
    _check_ids([block for pair in pairs for block in pair], pool.shape[2])
    from kernels.kv_blocks import triton_impl

    for wave in waves(pairs):
        triton_impl.copy(parts[0], torch.tensor(wave, dtype=torch.int64).to(pool.device))


def pack_blocks(tensors: Sequence[Tensor], ids: Sequence[int]) -> Tensor:
    """Blocks as bytes [n, block bytes]: of each, all tensors' shares one behind the other, as read_block returns them.

    Tensors are [any, any, blocks, any, any].
    """
    parts = _parts(tensors)
    _check_ids(ids, tensors[0].shape[2])
    size = sum(part.shape[0] * part.shape[2] * part.element_size() for part in parts)
    packed = torch.empty((len(ids), size), dtype=torch.uint8, device=tensors[0].device)
    from kernels.kv_blocks import triton_impl

    triton_impl.move(parts, packed, torch.tensor(ids, dtype=torch.int64).to(packed.device), to_pool=False)
    return packed


def unpack_blocks(tensors: Sequence[Tensor], ids: Sequence[int], packed: Tensor) -> None:
    """Writes bytes [n, block bytes], on the same device, into distinct blocks: what pack_blocks made of others."""
    parts = _parts(tensors)
    _check_ids(ids, tensors[0].shape[2])
    size = sum(part.shape[0] * part.shape[2] * part.element_size() for part in parts)
    if packed.shape != (len(ids), size) or packed.dtype != torch.uint8 or not packed.is_contiguous():
        raise ValueError(f"{list(packed.shape)} {packed.dtype} are not {len(ids)} blocks of {size} bytes")
    if len(set(ids)) != len(ids):
        raise ValueError("a block would be written twice")
    from kernels.kv_blocks import triton_impl

    triton_impl.move(parts, packed, torch.tensor(ids, dtype=torch.int64).to(packed.device), to_pool=True)


def offload_blocks(tensors: Sequence[Tensor], ids: Sequence[int], host: Tensor) -> None:
    """Blocks to host memory [n, block bytes], pinned; there once the current stream has come so far."""
    host.copy_(pack_blocks(tensors, ids), non_blocking=True)


def load_blocks(tensors: Sequence[Tensor], ids: Sequence[int], host: Tensor) -> None:
    """Blocks from host memory [n, block bytes], pinned, which may change once the current stream has come so far."""
    unpack_blocks(tensors, ids, host.to(tensors[0].device, non_blocking=True))


def demote_blocks(source: Tensor | NarrowBlocks, target: NarrowBlocks, pairs: Sequence[tuple[int, int]]) -> None:
    """Rewrites blocks (source, destination) in a colder pool's format, with the bits of NarrowBlocks.write.

    The source is a hot pool [layers, 2 * kv heads, blocks, block size, D] or a warmer one of all layers.
    """
    numbers = source if isinstance(source, torch.Tensor) else source.numbers
    shape = target.numbers.shape
    if numbers.dim() != 5 or len(shape) != 5 or numbers.shape[:2] != shape[:2] or numbers.shape[3] != shape[3]:
        raise ValueError(f"demotion of blocks {list(numbers.shape)} to {list(shape)}")
    if target.key_ranges.shape[4] % 2:
        raise ValueError(f"demotion of heads of {target.key_ranges.shape[4]} channels, which is odd")
    _check_ids([pair[0] for pair in pairs], numbers.shape[2])
    _check_ids([pair[1] for pair in pairs], shape[2])
    if len({pair[1] for pair in pairs}) != len(pairs):
        raise ValueError("a block would be written twice")
    from kernels.kv_blocks import triton_demote

    triton_demote.demote(source, target, torch.tensor(pairs, dtype=torch.int64).view(-1, 2).to(numbers.device))


def _parts(tensors: Sequence[Tensor]) -> list[Tensor]:
    """[A, blocks, words] of whole numbers as wide as all shares are multiples of, the same memory."""
    sizes = []
    for tensor in tensors:
        if tensor.dim() != 5 or not tensor.is_contiguous() or tensor.shape[2] != tensors[0].shape[2]:
            raise ValueError(
                f"blocks in {list(tensor.shape)}, strides {tensor.stride()}, among others of another shape"
            )
        sizes.append(tensor.shape[3] * tensor.shape[4] * tensor.element_size())
    width = math.gcd(8, *sizes)
    dtype = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[width]
    return [
        tensor.view(torch.uint8).view(-1, tensor.shape[2], size).view(dtype)
        for tensor, size in zip(tensors, sizes, strict=True)
    ]


def _check_ids(ids: Sequence[int], count: int) -> None:
    for block in ids:
        if not 0 <= block < count:
            raise ValueError(f"block {block} of a pool of {count}")
