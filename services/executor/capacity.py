"""How many KV blocks an executor gets."""

from __future__ import annotations

import re
from dataclasses import dataclass

from services.common.errors import QuireError, Reason
from services.executor.backends.base import KvShape

AUTO_SHARE = 4
"""Automatic sizing takes one part in this many of the memory that is free once the weights are loaded."""

_UNITS = {"": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


@dataclass(frozen=True, slots=True)
class KvDemand:
    """What is asked for: a size in bytes or a number of blocks, else a share of what is free."""

    block_size: int
    max_sequences: int
    context_length: int
    memory: int | None = None  # bytes
    blocks: int | None = None


def parse_bytes(text: str) -> int | None:
    """Bytes from "2GiB", "500MB" or "1073741824"; None from "auto". ValueError otherwise."""
    if text == "auto":
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError(f'{text!r} is neither "auto" nor a size such as "2GiB"')
    return int(float(match[1]) * _UNITS[match[2].upper()])


def kv_shape(demand: KvDemand, block_bytes: int, available: int) -> KvShape:
    """The pool. Raises MODEL_LOAD_FAILED where not even one block fits."""
    if demand.blocks is not None:
        return KvShape(demand.block_size, block_bytes, demand.blocks)
    if demand.memory is not None:
        if demand.memory > available:
            raise QuireError(
                Reason.MODEL_LOAD_FAILED,
                f"kv_memory: {_mib(demand.memory)} were asked for, {_mib(available)} are free",
            )
        count = demand.memory // block_bytes
    else:
        blocks_per_context = -(-demand.context_length // demand.block_size)
        count = min(available // AUTO_SHARE // block_bytes, demand.max_sequences * blocks_per_context)
    if count < 1:
        raise QuireError(
            Reason.MODEL_LOAD_FAILED, f"kv_memory: no block of {_mib(block_bytes)} fits ({_mib(available)} are free)"
        )
    return KvShape(demand.block_size, block_bytes, count)


def _mib(count: int) -> str:
    return f"{count / (1 << 20):.1f} MiB"
