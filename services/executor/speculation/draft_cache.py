"""The draft model's keys and values: which blocks a sequence has, and how much of them is computed. Pure: no I/O.

The scheduler grants both cache groups the same token slots, but the draft model computes only where it drafts, and may
be far behind. So a block that is settled for the target may hold nothing here yet: only blocks in `settled` count when
a sequence that shares them enters. What several sequences write into a shared block is the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING

from services.executor.backends.base import Int32
from services.executor.batch import BlockTables
from services.executor.inventory import Inventory
from services.executor.sequences import Sequence

if TYPE_CHECKING:
    from collections.abc import Sequence as Sequence_

GROUP = 1
"""The cache group; the target's is 0."""


@dataclass(slots=True)
class _Held:
    row: int  # in the block tables
    known: int  # the sequence's tokens that have KV here
    draft_ids: list[int] = field(default_factory=list)  # computed behind these, unless they were refused


class DraftCache:
    """Mutable; owned by the step thread."""

    def __init__(self, block_size: int, block_count: int) -> None:
        self.block_size, self.block_count = block_size, block_count
        self.clear()

    def clear(self) -> None:
        """Begins anew: nothing is known of any block."""
        self.inventory = Inventory(GROUP)
        self._tables = BlockTables(self.block_size)
        self._settled: set[int] = set()
        self._held: dict[int, _Held] = {}

    def enter(self, sequence_id: int, block_ids: list[int], cached: int) -> None:
        """A sequence comes with these blocks, of which those of its first `cached` tokens are shared."""
        shared = block_ids[: cached // self.block_size]
        self._gained(block_ids[len(shared) :])
        known = sum(1 for _ in takewhile(self._settled.__contains__, shared)) * self.block_size
        self._held[sequence_id] = _Held(self._tables.add(block_ids), known)

    def append(self, sequence_id: int, block_ids: list[int]) -> None:
        self._gained(block_ids)
        self._tables.append(self._held[sequence_id].row, block_ids)

    def leave(self, sequence_id: int) -> None:
        held = self._held.pop(sequence_id, None)
        if held is not None:
            self._tables.release(held.row)

    def copied(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Whole blocks (source, destination) were copied."""
        for source, destination in pairs:
            self._gained([destination])
            if source in self._settled:
                self._settled.add(destination)

    def computed(self, sequence: Sequence) -> int:
        """How many of its tokens have KV: those before its last drafts, and of these the ones that became tokens."""
        held = self._held[sequence.sequence_id]
        tokens = sequence.tokens
        for token_id in held.draft_ids:
            if held.known == len(tokens) or tokens[held.known] != token_id:
                break
            held.known += 1
        held.draft_ids = []
        self._settled.update(self._tables.ids(held.row)[: held.known // self.block_size])
        return held.known

    def wrote(self, sequence: Sequence, end: int, draft_ids: list[int]) -> None:
        """The draft model computed all up to `end`: tokens, then drafts."""
        held = self._held[sequence.sequence_id]
        held.known = min(end, len(sequence.tokens))
        held.draft_ids = draft_ids[: end - held.known]

    def slots(self, sequence: Sequence) -> int:
        """Tokens that its blocks hold."""
        return self._tables.slots(self._held[sequence.sequence_id].row)

    def gather(self, sequences: Sequence_[Sequence]) -> Int32:
        """Block tables of some sequences [n, blocks]."""
        return self._tables.gather([self._held[sequence.sequence_id].row for sequence in sequences])

    def _gained(self, block_ids: list[int]) -> None:
        self._settled.difference_update(block_ids)
        self.inventory.overwrite(block_ids)
