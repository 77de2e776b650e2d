"""How much of a prompt a place already holds: the same number of tokens in every cache group."""

from __future__ import annotations

from array import array
from typing import NamedTuple

from services.kvmanager.executors import Place
from services.kvmanager.keys import ROOT, KeySpace, block_keys, pack


class Match(NamedTuple):
    """The longest prefix found at a place."""

    cached_tokens: int
    blocks: tuple[list[int], ...]  # per cache group
    keys: tuple[list[bytes], ...]  # parallel to blocks


class PromptKeys:
    """Keys of a prompt's full blocks, computed once per group and block size, whatever the number of places."""

    def __init__(self, key_space: KeySpace, tokens: array[int]) -> None:
        self._key_space = key_space
        # At least one token is always computed: its logits are needed.
        self._packed = pack(tokens, 0, len(tokens) - 1)
        self._keys: dict[tuple[int, int], list[bytes]] = {}

    def of(self, group_id: int, block_size: int) -> list[bytes]:
        known = self._keys.get((group_id, block_size))
        if known is None:
            known = block_keys(self._key_space.prefix(group_id), ROOT, self._packed, block_size)
            self._keys[group_id, block_size] = known
        return known

    def match(self, place: Place) -> Match:
        """The longest common match over the place's pools. Changes nothing."""
        sizes = [pool.spec.block_size for pool in place.pools]
        keys = [self.of(pool.spec.group_id, pool.spec.block_size) for pool in place.pools]
        found = [pool.index.match(known) for pool, known in zip(place.pools, keys, strict=True)]
        tokens = common_length([len(blocks) * size for blocks, size in zip(found, sizes, strict=True)], sizes)
        return Match(
            tokens,
            tuple(blocks[: tokens // size] for blocks, size in zip(found, sizes, strict=True)),
            tuple(known[: tokens // size] for known, size in zip(keys, sizes, strict=True)),
        )


def no_match(place: Place) -> Match:
    """What is used of a place's content by a sequence that wants every position computed."""
    return Match(0, tuple([] for _ in place.pools), tuple([] for _ in place.pools))


def common_length(lengths: list[int], sizes: list[int]) -> int:
    """The longest length within all `lengths` that is whole blocks of every size."""
    length = min(lengths)
    while any(length % size for size in sizes):
        length = min(length - length % size for size in sizes)
    return length
