"""Which KV format a block has at which age, as a pure function of the sequence's length.

Ages count from the newest token back to a block's last one. A sequence's view changes only where its length is a
multiple of `PERIOD` tokens, so that neither chunk sizes nor neighbours decide in which format a token reads a block.
The first block stays hot: it holds the tokens that attention leans on whatever the text (StreamingLLM, Xiao et al.,
2023, call them sinks).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

PERIOD = 128
"""Tokens between two changes of a view; block sizes divide it."""
AHEAD_TOKENS = 2 * PERIOD
"""Slots beyond those with KV that a sequence with formats by age gets at once: older blocks shrink as it grows."""
OLDEST = 10**9
"""Tokens below which ages begin."""
COLDER_FORMATS = ("fp8", "int8", "int4")
KvAges = Literal["hot", "hot+warm", "hot+warm+cold"]
"""The choices of `--kv`: warm is int8, cold int4."""
NAMES: tuple[KvAges, ...] = get_args(KvAges)
HOT_TOKENS, WARM_TOKENS = 512, 2048
"""By default the newest tokens that stay hot, and those that are hot or warm."""


class Change(NamedTuple):
    """Where `length` tokens have KV, the block at `position` becomes one of age `age`."""

    length: int
    position: int
    age: int


@dataclass(frozen=True, slots=True)
class ColderAge:
    """Blocks whose last token is at least `after` tokens back are kept in `format`."""

    format: str
    after: int


@dataclass(frozen=True, slots=True)
class KvPolicy:
    """Age 0 is hot; `colder[i]` is age i + 1. No colder age: all stays hot."""

    colder: tuple[ColderAge, ...] = ()

    def __post_init__(self) -> None:
        """Raises ValueError for ages that are not ever older, or formats that are not ever different."""
        ages = [0, *(age.after for age in self.colder)]
        if any(later <= earlier for earlier, later in itertools.pairwise(ages)):
            raise ValueError("each KV format must begin at a greater age than the one before")
        if ages[-1] >= OLDEST:
            raise ValueError(f"KV formats begin at ages below {OLDEST} tokens")
        formats = [age.format for age in self.colder]
        if len(set(formats)) != len(formats) or not set(formats) <= set(COLDER_FORMATS):
            raise ValueError(f"colder KV formats are distinct ones of {', '.join(COLDER_FORMATS)}, not {formats}")

    @classmethod
    def parse(cls, text: str) -> KvPolicy:
        """From what `str` gives: "" or for example "hot:512,int8:2048,int4". Raises ValueError for anything else."""
        if not text:
            return cls()
        colder, after = [], 0
        for index, part in enumerate(parts := text.split(",")):
            is_last = index == len(parts) - 1
            match = re.fullmatch(r"([a-z]+[0-9]*)" if is_last else r"([a-z]+[0-9]*):([0-9]{1,9})", part)
            if match is None or (match[1] == "hot") != (index == 0) or len(parts) == 1:
                raise ValueError(f"{text!r} is no KV policy such as 'hot:512,int8:2048,int4'")
            if index:
                colder.append(ColderAge(match[1], after))
            if not is_last:
                after = int(match[2])
        return cls(tuple(colder))

    @classmethod
    def named(cls, kv: str, hot_tokens: int = HOT_TOKENS, warm_tokens: int = WARM_TOKENS) -> KvPolicy:
        """What `--kv` means: one of NAMES. Raises ValueError for another, or where warm ends before hot does."""
        if kv not in NAMES:
            raise ValueError(f"{kv!r} is none of {', '.join(NAMES)}")
        ages = (ColderAge("int8", hot_tokens), ColderAge("int4", warm_tokens))
        return cls(ages[: NAMES.index(kv)])

    def __str__(self) -> str:
        if not self.colder:
            return ""
        names = ["hot", *(age.format for age in self.colder)]
        return ",".join([*(f"{name}:{age.after}" for name, age in zip(names, self.colder, strict=False)), names[-1]])

    def age(self, position: int, block_size: int, length: int) -> int:
        """The age that the block at `position` has for a token at position `length`."""
        if position == 0:
            return 0
        back = length // PERIOD * PERIOD - (position + 1) * block_size
        return sum(back >= colder.after for colder in self.colder)

    def counts(self, block_size: int, length: int) -> list[int]:
        """Blocks of each age that a sequence of `length` tokens has."""
        blocks, view = -(-length // block_size), length // PERIOD * PERIOD
        # Of this age or an older one. The first block is none of them.
        older = (max(0, min(blocks, (view - colder.after) // block_size) - 1) for colder in self.colder)
        return [more - fewer for more, fewer in itertools.pairwise([blocks, *older, 0])]

    def most_counts(self, block_size: int, length: int) -> list[int]:
        """Blocks of each age that suffice for a sequence on its way to `length` tokens."""
        blocks, (hot, *colder) = -(-length // block_size), self.counts(block_size, length)
        return [min(blocks, hot + -(-AHEAD_TOKENS // block_size)), *colder]

    def changes(self, block_size: int, after: int, through: int) -> Iterator[Change]:
        """Changes at lengths in (after, through], by ascending length; `age` holds from there on.

        No age is passed over: where a block skips one, it takes both at once, so that each is made of the one before.
        """
        if not self.colder:
            return
        for length in range((after // PERIOD + 1) * PERIOD, through + 1, PERIOD):
            for age, colder in enumerate(self.colder, 1):
                oldest = (length - PERIOD - colder.after) // block_size
                for position in range(max(oldest, 1), (length - colder.after) // block_size):
                    yield Change(length, position, age)


HOT_ONLY = KvPolicy()
