"""For which sizes decode steps are captured, and which of them serves a batch. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

FIRST_CONTEXT = 2048
CONTEXT_STEP = 8
"""Contexts are captured from so many tokens on, each this many times the one before: a context decides into how many
parts it is split."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """The most that a captured step computes."""

    sequences: int
    queries: int  # of one sequence: a token and its drafts
    context: int  # tokens

    @property
    def rows(self) -> int:
        return self.sequences * self.queries


def buckets(max_sequences: int, most_queries: int, context_length: int) -> list[Bucket]:
    """All that are to be captured, the largest first, so that smaller ones fit into the memory of larger ones."""
    contexts = [context_length]
    size = FIRST_CONTEXT
    while size < context_length:
        contexts.append(size)
        size *= CONTEXT_STEP
    queries = _powers(most_queries)
    found = [
        Bucket(sequences, count, context)
        for sequences in _sequences(max_sequences)
        for count in queries
        for context in contexts
    ]
    return sorted(found, key=lambda bucket: (bucket.rows, bucket.context), reverse=True)


def find_bucket(among: Iterable[Bucket], sequences: int, queries: int, context: int) -> Bucket | None:
    """The least that holds the batch; None where none does."""
    fitting = [
        bucket
        for bucket in among
        if bucket.sequences >= sequences and bucket.queries >= queries and bucket.context >= context
    ]
    return min(fitting, key=lambda bucket: (bucket.rows, bucket.context), default=None)


def _sequences(most: int) -> Sequence[int]:
    """1, 2, 4, 8, then steps of an eighth to a quarter of a size, so that little of a batch is padding."""
    sizes, size = [], 1
    while size < most:
        sizes.append(size)
        size += 1 if size == 1 else 2 if size == 2 else 4 if size == 4 else max(8, 1 << (size.bit_length() - 3))
    return [*sizes, most]


def _powers(most: int) -> Sequence[int]:
    """1, 2, 4, ... and what holds `most`."""
    sizes = [1]
    while sizes[-1] < most:
        sizes.append(sizes[-1] * 2)
    return sizes
