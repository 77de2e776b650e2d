"""What keys and values cost: bytes of a block in each format, blocks of a sequence on its way, pools within a budget.

Pure arithmetic. Layouts are those of kernels/paged_attention/kv_layout.h: int8 and int4 keys have a scale per channel
of a block, values one per token; int4 has a minimum beside each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from services.common.kv_policy import PERIOD, KvPolicy

BITS = {"fp32": 32, "bf16": 16, "fp16": 16, "int8": 8, "int4": 4}
"""Of one number in each format."""

_SCALE_BYTES = {"int8": 2, "int4": 4}
_PADDED_TO = 32


@dataclass(frozen=True, slots=True)
class KvDims:
    """What a model keeps of a token: `layer_count` times `kv_head_count` keys and values, of so many numbers each."""

    layer_count: int
    kv_head_count: int
    key_size: int
    value_size: int

    def padded(self) -> KvDims:
        """As native code stores it: heads filled up to a multiple of 32 numbers."""
        return replace(self, key_size=_pad(self.key_size), value_size=_pad(self.value_size))


def block_bytes(dims: KvDims, format_: str, block_size: int) -> int:
    """Bytes of one block over all layers, scales included. Raises ValueError for a format without a layout."""
    if format_ not in BITS:
        raise ValueError(f"KV format {format_} has no layout; there are {', '.join(BITS)}")
    numbers = (dims.key_size + dims.value_size) * block_size * BITS[format_] // 8
    scales = dims.key_size + (block_size if dims.value_size else 0)
    return dims.layer_count * dims.kv_head_count * (numbers + scales * _SCALE_BYTES.get(format_, 0))


def token_bytes(dims: KvDims, format_: str) -> int:
    """Bytes of one token's keys and values, without scales and padding: the figure that is usually quoted."""
    return dims.layer_count * dims.kv_head_count * (dims.key_size + dims.value_size) * BITS[format_] // 8


def most_blocks_by_age(policy: KvPolicy, block_size: int, length: int) -> tuple[int, ...]:
    """The most blocks of each age that a sequence holds on its way to `length` tokens, hot first.

    Where blocks change, both copies are held, together with a block for the tokens to come. Counts of ages grow with
    the length, but for that block: so the last two changes and the end are what matters.
    """
    most = policy.counts(block_size, length)
    last = length // PERIOD * PERIOD
    for change in (last - PERIOD, last):
        if change <= 0:
            continue
        held = policy.counts(block_size, change - 1)
        held[0] += _up(min(length, change + 1), block_size) - sum(held)
        for moved in policy.changes(block_size, change - 1, change):
            held[moved.age] += 1
        most = list(map(max, most, held))
    return tuple(most)


def split_memory(
    memory: int, sizes: Sequence[int], policy: KvPolicy, block_size: int, length: int, least_hot: int = 0
) -> tuple[int, ...]:
    """Blocks for a pool of each age, hot first, which together take at most `memory` bytes.

    `sizes` are the bytes of a block of each age. As many sequences of `length` tokens fit into one pool as into any
    other; what rounding leaves goes to the hot one. That has `least_hot` blocks or more, whatever the others lose by
    it: a prompt that enters whole needs so many. An age that `length` does not reach gets no blocks. Raises ValueError
    where a pool that is needed would be empty.
    """
    blocks = most_blocks_by_age(policy, block_size, length)
    counts = _shares(memory, sizes, blocks)
    if counts[0] < least_hot:
        counts = [least_hot, *_shares(memory - least_hot * sizes[0], sizes[1:], blocks[1:])]
    rest = memory - sum(size * count for size, count in zip(sizes, counts, strict=True))
    counts[0] += max(rest, 0) // sizes[0]
    if rest < 0 or any(needed and not count for needed, count in zip(blocks, counts, strict=True)):
        raise ValueError(f"{memory} bytes hold too few blocks of {', '.join(map(str, sizes))} bytes")
    return tuple(counts)


def _shares(memory: int, sizes: Sequence[int], blocks: Sequence[int]) -> list[int]:
    """Multiples of `blocks`, rounded down, that take at most `memory`; all 0 where no blocks are wanted."""
    cost = sum(size * count for size, count in zip(sizes, blocks, strict=True))
    return [max(memory, 0) * count // cost if cost else 0 for count in blocks]


def _up(count: int, step: int) -> int:
    return -(-count // step)


def _pad(size: int) -> int:
    return _up(size, _PADDED_TO) * _PADDED_TO
