"""What a scheduler holds: its sessions, and each sequence's blocks, tokens and keys."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from services.kvmanager.blocks import BlockState
from services.kvmanager.keys import ROOT, block_keys, pack
from services.kvmanager.pools import Pool

if TYPE_CHECKING:
    from services.kvmanager.executors import Executor


class Refused(ValueError):
    """A malformed, repeated or late message: nothing changed."""


class Sealed(NamedTuple):
    """A block that became full and is now the one of its key."""

    group_id: int
    block_id: int
    key: bytes


@dataclass(slots=True)
class GroupHolding:
    """A sequence's blocks in one cache group."""

    pool: Pool
    key_prefix: bytes
    blocks: list[int]  # in order of position
    keys: list[bytes]  # of the leading, full blocks

    @property
    def slots(self) -> int:
        """Tokens that fit."""
        return len(self.blocks) * self.pool.spec.block_size


@dataclass(slots=True, eq=False)
class Holding:
    """One sequence. `computed` tokens have KV: blocks wholly below are ready, the one it ends in is pending."""

    sequence_id: int
    session: Session = field(repr=False)
    executor: Executor = field(repr=False)
    epoch: int
    tokens: array[int]  # prompt and output so far
    computed: int
    groups: tuple[GroupHolding, ...]
    slots: int = 0  # tokens that fit in every group
    _next_change: int = 0  # computed length at which a block changes its state

    def __post_init__(self) -> None:
        self.slots = min(group.slots for group in self.groups)
        self._next_change = self.computed + 1

    def advance(self, computed: int, token_ids: Sequence[int]) -> list[Sealed]:
        """Takes in computed length and new output tokens; returns the blocks that became full and keyed.

        After new output exactly the last token is still without KV: anything else is a repeated or lost message.
        """
        known = len(self.tokens) + len(token_ids)
        if computed < self.computed:
            raise Refused(f"computed length runs back from {self.computed} to {computed}")
        if computed > known or (token_ids and computed != known - 1):
            raise Refused(f"computed length {computed} does not go with {known} known tokens")
        if computed > self.slots:
            raise Refused(f"computed length {computed} is beyond the {self.slots} slots held")
        if token_ids:
            if min(token_ids) < 0:
                raise Refused("negative token id")
            self.tokens.extend(token_ids)
        self.computed = computed
        return self._settle() if computed >= self._next_change else []

    def grow(self, group: GroupHolding, count: int) -> list[int]:
        """Appends fresh blocks to a group; the caller has checked the room."""
        blocks = group.pool.acquire((), count)
        group.blocks += blocks
        self.slots = min(group.slots for group in self.groups)
        return blocks

    def _settle(self) -> list[Sealed]:
        sealed = []
        next_change: float = math.inf
        for group in self.groups:
            pool, first = group.pool, len(group.keys)
            size = pool.spec.block_size
            full, part = divmod(self.computed, size)
            if full > first:
                parent = group.keys[-1] if group.keys else ROOT
                packed = pack(self.tokens, first * size, full * size)
                for key in block_keys(group.key_prefix, parent, packed, size):
                    block = group.blocks[len(group.keys)]
                    group.keys.append(key)
                    if pool.settle(block, key):
                        sealed.append(Sealed(pool.spec.group_id, pool.spec.first_block_id + block, key))
            if part:
                pool.blocks.advance(group.blocks[full], BlockState.PENDING)
            next_change = min(next_change, (full + 1) * size if part else self.computed + 1)
        self._next_change = int(next_change)
        return sealed


@dataclass(slots=True, eq=False)
class Session:
    """One stream of a scheduler, and what was reserved on it."""

    scheduler_id: str
    holdings: dict[int, Holding] = field(default_factory=dict)  # by sequence
    lease_end: float = math.inf  # seconds on the caller's clock; infinite while the stream lasts
