"""How much of a prompt a place already holds: the same number of tokens in every cache group."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from services.common.kv_policy import Change, KvPolicy
from services.kvmanager.executors import Place
from services.kvmanager.holdings import Holding
from services.kvmanager.keys import ROOT, KeySpace, block_keys, pack
from services.kvmanager.pools import Pool


@dataclass(frozen=True, slots=True)
class GroupMatch:
    """Found blocks of one cache group, in order of position, each within the pool of its age."""

    blocks: list[int]
    keys: list[bytes]  # of all full blocks of the tokens, found or not
    demoted: dict[int, int]  # position -> age, of found blocks that are not hot

    def key(self, position: int) -> bytes | None:
        return self.keys[position] if position < len(self.keys) else None

    def by_age(self, ages: int) -> list[list[int]]:
        """The found blocks of each pool."""
        if not self.demoted:
            return [self.blocks, *([] for _ in range(ages - 1))]
        found: list[list[int]] = [[] for _ in range(ages)]
        for position, block in enumerate(self.blocks):
            found[self.demoted.get(position, 0)].append(block)
        return found

    def conversions(self, policy: KvPolicy, block_size: int, length: int) -> Iterator[Change]:
        """What brings found blocks to the ages that a sequence of this length reads: one age after the other."""
        for position in range(len(self.blocks) if policy.colder else 0):
            for age in range(self.demoted.get(position, 0) + 1, policy.age(position, block_size, length) + 1):
                yield Change(length, position, age)


class Filler(NamedTuple):
    """A sequence that is computing what comes next in a prompt, and how far it goes."""

    holding: Holding
    length: int  # tokens


class Match(NamedTuple):
    """The longest prefix found at a place, and who computes more of it at this moment."""

    cached_tokens: int
    groups: tuple[GroupMatch, ...]
    filler: Filler | None = None


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

    def first(self, group_id: int, block_size: int) -> bytes | None:
        """The key of the first full block; None where there is none."""
        keys = self.of(group_id, block_size)
        return keys[0] if keys else None

    def match(self, place: Place, policy: KvPolicy) -> Match:
        """The longest common match over the place's groups. Changes nothing."""
        sizes = [pool.spec.block_size for pool in place.pools]
        keys = [self.of(pool.spec.group_id, pool.spec.block_size) for pool in place.pools]
        tokens = -1
        limits = [len(known) for known in keys]
        while True:
            groups = tuple(
                _match_group(ages, known, limit, policy)
                for ages, known, limit in zip(place.groups, keys, limits, strict=True)
            )
            lengths = [len(group.blocks) * size for group, size in zip(groups, sizes, strict=True)]
            tokens = common_length(lengths, sizes)
            if all(length == tokens for length in lengths):
                return Match(tokens, groups, _filler(place, keys, sizes, tokens))
            limits = [tokens // size for size in sizes]  # a shorter match may prescribe other ages


def no_match(keys: PromptKeys, place: Place) -> Match:
    """What is used of a place's content by a sequence that wants every position computed."""
    return Match(0, tuple(GroupMatch([], keys.of(p.spec.group_id, p.spec.block_size), {}) for p in place.pools))


def common_length(lengths: list[int], sizes: list[int]) -> int:
    """The longest length within all `lengths` that is whole blocks of every size."""
    length = min(lengths)
    while any(length % size for size in sizes):
        length = min(length - length % size for size in sizes)
    return length


def _match_group(ages: Sequence[Pool], keys: list[bytes], limit: int, policy: KvPolicy) -> GroupMatch:
    wanted = keys if limit == len(keys) else keys[:limit]
    if not policy.colder:
        return GroupMatch(ages[0].index.match(wanted), keys, {})
    copies: list[list[int | None]] = []  # by position and age
    for key in wanted:
        found = [pool.index.find(key) for pool in ages]
        if all(block is None for block in found):
            break
        copies.append(found)
    return _coldest_allowed(copies, keys, ages[0].spec.block_size, policy)


def _coldest_allowed(
    copies: list[list[int | None]], keys: list[bytes], block_size: int, policy: KvPolicy
) -> GroupMatch:
    """The longest run of copies that are none of them colder than a sequence of that length reads them."""
    count = len(copies)
    while True:
        blocks, demoted = [], {}
        for position in range(count):
            for age in range(policy.age(position, block_size, count * block_size), -1, -1):
                block = copies[position][age]
                if block is not None:
                    blocks.append(block)
                    if age:
                        demoted[position] = age
                    break
            else:
                break
        if len(blocks) == count:
            return GroupMatch(blocks, keys, demoted)
        count = len(blocks)  # shorter: newer, so that more must be hot


def _filler(place: Place, keys: list[list[bytes]], sizes: list[int], cached: int) -> Filler | None:
    """Who computes the block after the match in every group; it may go on for some blocks more."""
    holding: Holding | None = None
    lengths = []
    for known, size in zip(keys, sizes, strict=True):
        first = cached // size
        found = place.filling.get(known[first]) if first < len(known) else None
        if found is None or not found.session.is_open or (holding is not None and found is not holding):
            return None
        holding = found
        count = first
        while count < len(known) and place.filling.get(known[count]) is holding:
            count += 1
        lengths.append(count * size)
    length = common_length(lengths, sizes)
    return Filler(holding, length) if holding is not None and length > cached else None
