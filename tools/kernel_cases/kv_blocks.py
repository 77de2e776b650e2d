"""Whole blocks."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernels.kv_blocks import copy_blocks, demote_blocks, pack_blocks, unpack_blocks
from kernels.kv_write import NarrowBlocks

CPU = torch.device("cpu")
SHAPE = (1, 2, 4, 16, 128)


def cases() -> dict[str, Callable[[], object]]:
    hot = torch.zeros(1, 4, *SHAPE[2:], dtype=torch.bfloat16)
    packed = torch.zeros(1, hot[:, :, 0].nbytes, dtype=torch.uint8)
    found: dict[str, Callable[[], object]] = {
        "copy": lambda: copy_blocks(hot, [(0, 1)]),
        "pack": lambda: pack_blocks([hot], [1]),
        "unpack": lambda: unpack_blocks([hot], [1], packed),
    }
    for target in ("int8", "fp8", "int4"):
        found[f"hot to {target}"] = lambda t=target: demote_blocks(hot, NarrowBlocks.zeros(t, SHAPE, CPU), [(0, 1)])  # type: ignore[misc]
    for source in ("int8", "fp8"):
        warm = NarrowBlocks.zeros(source, SHAPE, CPU)
        found[f"{source} to int4"] = lambda s=warm: demote_blocks(s, NarrowBlocks.zeros("int4", SHAPE, CPU), [(0, 1)])  # type: ignore[misc]
    return found
