"""Changes of a sequence's block table to colder copies: checked when a plan brings them, held until they are due."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.v1 import executor_pb2
from services.common.errors import invalid
from services.common.kv_policy import PERIOD

if TYPE_CHECKING:
    from services.executor.admission import ModelLimits


@dataclass(frozen=True, slots=True)
class Change:
    """Where `length` tokens of a sequence have KV, `position` of its block table names `block_id`."""

    length: int
    position: int
    block_id: int
    writes: bool  # the copy is made of the block that the position named before; else it is ready


class Demotions:
    """What lies ahead of one sequence, by ascending length. Mutable; owned by the step thread."""

    def __init__(self) -> None:
        self._changes: deque[Change] = deque()
        self._named: dict[int, int] = {}  # position -> block id once all changes are made, where that differs

    def __bool__(self) -> bool:
        return bool(self._changes)

    def add(self, demotion: executor_pb2.BlockDemotion, computed: int, table: list[int], limits: ModelLimits) -> None:
        """Takes in a well-formed demotion of a sequence with `computed` tokens and this table. Raises INVALID_FIELD."""
        length = demotion.at_length
        if length < computed or (length > computed and length % PERIOD):
            raise invalid("demotions.at_length", f"{length} is neither the {computed} computed nor a later {PERIOD}th")
        if self._changes and length < self._changes[-1].length:
            raise invalid("demotions.at_length", f"{length} comes after {self._changes[-1].length}")
        full = min(len(table), length // limits.block_size)
        for position, block_id, writes in zip(demotion.positions, demotion.block_ids, demotion.writes, strict=True):
            if not 0 <= position < full:
                raise invalid("demotions.positions", f"{position} is not one of the {full} blocks full at {length}")
            before, pool = limits.pool_of(self._named.get(position, table[position])), limits.pool_of(block_id)
            if pool <= before or (writes and pool > before + 1):
                raise invalid("demotions.block_ids", f"a block of pool {pool} cannot follow one of pool {before}")
            self._named[position] = block_id
            self._changes.append(Change(length, position, block_id, writes))

    def due(self, computed: int) -> Iterator[Change]:
        """Takes out what is due, in order."""
        while self._changes and self._changes[0].length <= computed:
            change = self._changes.popleft()
            if self._named[change.position] == change.block_id:
                del self._named[change.position]
            yield change

    def room(self, computed: int) -> int:
        """How many tokens a step may compute before the next change; at least 1 once those due are taken out."""
        return self._changes[0].length - computed
