"""How many sequences of a length fit into a memory beside a model's weights, with each KV format and policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.common.kv_policy import NAMES, KvPolicy
from services.executor.kv_bytes import KvDims, block_bytes, most_blocks_by_age, split_memory

BLOCK_SIZE = 32
"""Token slots of a block of the cpu backend."""
NARROW_FORMATS = ("int8", "int4")


@dataclass(frozen=True, slots=True)
class Pool:
    """Blocks of one format, as memory is best divided for sequences of the planned length."""

    format: str
    block_bytes: int
    block_count: int


@dataclass(frozen=True, slots=True)
class Fit:
    """What one way of keeping KV comes to."""

    name: str  # a KV format for all blocks, or a choice of --kv
    policy: KvPolicy
    bytes_per_token: float  # scales and padding included
    sequence_bytes: int  # of a sequence of exactly the planned length
    most_sequence_bytes: int  # on its way there, while blocks that change format are held in both
    sequence_count: int
    token_count: int  # in all
    longest_context: int  # of a single sequence
    saved: float  # share of the bytes that hot blocks alone take
    pools: tuple[Pool, ...]  # hot first; no blocks where not even one sequence fits


def fits(dims: KvDims, hot_format: str, memory: int, context: int) -> tuple[list[Fit], list[Fit]]:
    """One for each format that all blocks could be in, and one for each choice of --kv; `memory` is the KV's."""
    stored = dims.padded()
    hot_bytes = block_bytes(stored, hot_format, BLOCK_SIZE) * KvPolicy().counts(BLOCK_SIZE, context)[0]

    def fit(name: str, policy: KvPolicy, formats: Sequence[str]) -> Fit:
        sizes = [block_bytes(stored, format_, BLOCK_SIZE) for format_ in formats]
        sequence = _cost(sizes, policy.counts(BLOCK_SIZE, context))
        most = _cost(sizes, most_blocks_by_age(policy, BLOCK_SIZE, context))
        counts = split_memory(memory, sizes, policy, BLOCK_SIZE, context) if memory >= most else [0] * len(sizes)
        return Fit(
            name=name,
            policy=policy,
            bytes_per_token=sequence / context if policy.colder else sizes[0] / BLOCK_SIZE,
            sequence_bytes=sequence,
            most_sequence_bytes=most,
            sequence_count=memory // most,
            token_count=memory * context // most if policy.colder else memory // sizes[0] * BLOCK_SIZE,
            longest_context=longest_context(memory, sizes, policy),
            saved=1 - sequence / hot_bytes,
            pools=tuple(map(Pool, formats, sizes, counts)),
        )

    half = hot_format if hot_format != "fp32" else "bf16"
    whole = [fit(format_, KvPolicy(), [format_]) for format_ in ("fp32", half, *NARROW_FORMATS)]
    policies = [(name, KvPolicy.named(name)) for name in NAMES]
    by_age = [fit(name, policy, [hot_format, *(age.format for age in policy.colder)]) for name, policy in policies]
    return whole, by_age


def longest_context(memory: int, sizes: Sequence[int], policy: KvPolicy) -> int:
    """Tokens of the longest sequence whose blocks fit; `sizes` are the bytes of a block of each age."""
    fitting, beyond = 0, (memory // min(sizes) + 1) * BLOCK_SIZE + 1
    while beyond - fitting > 1:
        middle = (fitting + beyond) // 2
        if _cost(sizes, most_blocks_by_age(policy, BLOCK_SIZE, middle)) <= memory:
            fitting = middle
        else:
            beyond = middle
    return fitting


def _cost(sizes: Sequence[int], counts: Sequence[int]) -> int:
    return sum(size * count for size, count in zip(sizes, counts, strict=True))
