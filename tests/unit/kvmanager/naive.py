"""The same rules as the kvmanager's, with plain lists and whole prefixes in place of arrays and keys."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

Prefix = tuple[int, ...]


@dataclass(eq=False)
class NaiveSequence:
    executor: NaiveExecutor
    epoch: int
    tokens: list[int]
    computed: int
    blocks: list[int]


@dataclass(eq=False)
class NaiveExecutor:
    """One pool. `free` and `cached` are in the order in which their blocks go next."""

    count: int
    size: int
    epoch: int
    closed_through: int = -1
    connected: bool = True
    free: list[int] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)
    content: dict[int, Prefix] = field(default_factory=dict)
    sequences: list[NaiveSequence] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.free = list(range(self.count))

    def blocks_for(self, tokens: int) -> int:
        return (tokens + self.size - 1) // self.size

    def holders(self, block: int) -> int:
        return sum(sequence.blocks.count(block) for sequence in self.sequences)

    def holding(self, prefix: Iterable[int]) -> int | None:
        return next((block for block, known in self.content.items() if known == tuple(prefix)), None)

    def matched(self, tokens: list[int]) -> list[int]:
        blocks: list[int] = []
        while (len(blocks) + 1) * self.size < len(tokens):
            block = self.holding(tokens[: (len(blocks) + 1) * self.size])
            if block is None:
                break
            blocks.append(block)
        return blocks

    def take(self, count: int) -> list[int]:
        taken = []
        for _ in range(count):
            if self.free:
                taken.append(self.free.pop(0))
            else:
                taken.append(self.cached.pop(0))
                del self.content[taken[-1]]
        return taken

    def reserve(self, tokens: list[int], lookahead: int, epoch: int) -> NaiveSequence | str:
        whole, matched = self.blocks_for(len(tokens) + lookahead), self.matched(tokens)
        idle = [block for block in matched if block in self.cached]
        if whole > self.count:
            return "NEVER_FITS"
        if whole - len(matched) > len(self.free) + len(self.cached) - len(idle):
            return "NO_BLOCKS"
        self.cached = [block for block in self.cached if block not in idle]
        blocks = matched + self.take(whole - len(matched))
        sequence = NaiveSequence(self, epoch, list(tokens), len(matched) * self.size, blocks)
        self.sequences.append(sequence)
        return sequence

    def extend(self, sequence: NaiveSequence, slots: int) -> list[int] | str:
        missing = self.blocks_for(slots) - len(sequence.blocks)
        if missing <= 0:
            return []
        if self.blocks_for(slots) > self.count:
            return "NEVER_FITS"
        if missing > len(self.free) + len(self.cached):
            return "NO_BLOCKS"
        gained = self.take(missing)
        sequence.blocks += gained
        return gained

    def progress(self, sequence: NaiveSequence, computed: int, token_ids: list[int]) -> list[int]:
        """Blocks that got a key."""
        sequence.tokens += token_ids
        sealed = []
        for position in range(sequence.computed // self.size, computed // self.size):
            prefix = tuple(sequence.tokens[: (position + 1) * self.size])
            if self.holding(prefix) is None:
                self.content[sequence.blocks[position]] = prefix
                sealed.append(sequence.blocks[position])
        sequence.computed = computed
        return sealed

    def release(self, sequence: NaiveSequence) -> None:
        self.sequences.remove(sequence)
        for position in reversed(range(len(sequence.blocks))):
            block = sequence.blocks[position]
            if self.holders(block) == 0:
                if block in self.content:
                    self.cached.append(block)
                else:
                    self.free.insert(0, block)
            prefix = tuple(sequence.tokens[: (position + 1) * self.size])
            twin = self.holding(prefix)
            if position < sequence.computed // self.size and block not in self.content and twin in self.cached:
                self.cached.remove(twin)
                self.cached.append(twin)

    def keep_only(self, blocks: set[int]) -> None:
        for block in [block for block in self.content if block not in blocks]:
            del self.content[block]
            if block in self.cached:
                self.cached.remove(block)
                self.free.insert(0, block)
