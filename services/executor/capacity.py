"""How many KV blocks of each format an executor gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.common.errors import QuireError, Reason
from services.common.kv_policy import HOT_ONLY, KvPolicy
from services.common.sizes import format_size
from services.executor.backends.base import ColderPool, KvShape
from services.executor.kv_bytes import most_blocks_by_age, split_memory

AUTO_SHARE = 4
"""Automatic sizing takes one part in this many of the host memory that is free once the weights are loaded."""


@dataclass(frozen=True, slots=True)
class KvDemand:
    """What is asked for: a size in bytes or a number of blocks in each format, else a share of what is free."""

    block_size: int
    max_sequences: int
    context_length: int
    memory: int | None = None  # bytes
    blocks: int | None = None
    policy: KvPolicy = HOT_ONLY
    share: int = AUTO_SHARE


def kv_shape(demand: KvDemand, block_bytes: Sequence[int], available: int) -> KvShape:
    """The pools; `block_bytes` of each age, hot first. Raises MODEL_LOAD_FAILED where not even one block fits.

    Formats share the memory as sequences that fill the context need them; at most half of it goes to one prompt that
    enters whole, hot.
    """
    size, context, policy = demand.block_size, demand.context_length, demand.policy
    prompt_blocks = -(-context // size)
    if demand.blocks is not None:
        return _shape(demand, block_bytes, [demand.blocks] * len(block_bytes))
    if demand.memory is not None:
        if demand.memory > available:
            raise QuireError(
                Reason.MODEL_LOAD_FAILED,
                f"kv_memory: {format_size(demand.memory)} were asked for, {format_size(available)} are free",
            )
        budget = demand.memory
    else:
        of_sequence = zip(most_blocks_by_age(policy, size, context), block_bytes, strict=True)
        most = demand.max_sequences * sum(count * bytes_ for count, bytes_ in of_sequence)
        if policy.colder:
            most += prompt_blocks * block_bytes[0]
        budget = min(available // demand.share, most)
    whole_prompt = min(prompt_blocks, budget // 2 // block_bytes[0])
    try:
        counts = split_memory(budget, block_bytes, policy, size, context, whole_prompt)
    except ValueError:
        raise QuireError(
            Reason.MODEL_LOAD_FAILED,
            f"kv_memory: no block of {format_size(block_bytes[0])} fits ({format_size(available)} are free)",
        ) from None
    # A context may be too short for an age, but its pool must exist.
    return _shape(demand, block_bytes, [max(count, 1) for count in counts])


def _shape(demand: KvDemand, block_bytes: Sequence[int], counts: Sequence[int]) -> KvShape:
    colder = zip(demand.policy.colder, block_bytes[1:], counts[1:], strict=True)
    pools = tuple(ColderPool(age.format, size, count) for age, size, count in colder)
    return KvShape(demand.block_size, block_bytes[0], counts[0], pools)


def served_context(shape: KvShape, policy: KvPolicy, context_length: int) -> int:
    """The longest context that one sequence finds room for in these pools: its last token needs none."""
    if not policy.colder:
        return min(shape.block_count * shape.block_size + 1, context_length)
    pools = (shape.block_count, *(pool.block_count for pool in shape.colder))
    fitting = 0
    for end in range(shape.block_size, context_length - 1 + shape.block_size, shape.block_size):
        for length in (end - shape.block_size + 1, end):  # within a block, counts change there alone
            counts = policy.most_counts(shape.block_size, length)
            if any(count > most for count, most in zip(counts, pools, strict=True)):
                return min(fitting + 1, context_length)
            fitting = length if length == end else end - 1
    return context_length
