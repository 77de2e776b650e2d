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
    prompt: list[int] = field(default_factory=list)
    is_open: bool = True  # its scheduler's stream lasts


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
    filling: dict[Prefix, NaiveSequence] = field(default_factory=dict)  # who said first that it computes a block

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

    def filler(self, tokens: list[int], cached: int) -> tuple[NaiveSequence, int] | None:
        """Who is computing what follows the cached tokens, and how far it goes."""
        end, found = cached + self.size, None
        while end < len(tokens):
            sequence = self.filling.get(tuple(tokens[:end]))
            if sequence is None or not sequence.is_open or (found is not None and sequence is not found):
                break
            found, end = sequence, end + self.size
        return None if found is None else (found, end - self.size)

    def reserve(self, tokens: list[int], lookahead: int, epoch: int) -> NaiveSequence | tuple[NaiveSequence, int] | str:
        whole, matched = self.blocks_for(len(tokens) + lookahead), self.matched(tokens)
        idle = [block for block in matched if block in self.cached]
        if whole > self.count:
            return "NEVER_FITS"
        if whole - len(matched) > len(self.free) + len(self.cached) - len(idle):
            return "NO_BLOCKS"
        filler = self.filler(tokens, len(matched) * self.size)
        if filler is not None:
            return filler
        self.cached = [block for block in self.cached if block not in idle]
        blocks = matched + self.take(whole - len(matched))
        sequence = NaiveSequence(self, epoch, list(tokens), len(matched) * self.size, blocks, list(tokens))
        self.sequences.append(sequence)
        for end in range((len(matched) + 1) * self.size, len(tokens), self.size):
            self.filling.setdefault(tuple(tokens[:end]), sequence)
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
        self.filled(sequence, computed)
        return sealed

    def filled(self, sequence: NaiveSequence, through: int) -> None:
        mine = [prefix for prefix, filler in self.filling.items() if filler is sequence and len(prefix) <= through]
        for prefix in mine:
            del self.filling[prefix]

    def release(self, sequence: NaiveSequence) -> None:
        self.sequences.remove(sequence)
        self.filled(sequence, len(sequence.prompt))
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
