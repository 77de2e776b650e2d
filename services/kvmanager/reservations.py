"""What schedulers ask for and what they get, apart from the wire."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from services.common.kv_policy import KvPolicy
from services.kvmanager.copies import Demotion
from services.kvmanager.holdings import Holding
from services.kvmanager.keys import KeySpace
from services.kvmanager.placement import Outcome
from services.kvmanager.pools import Pool
from services.kvmanager.retention import NO_RETENTION, PRIORITIES, Retention


class GroupBlocks(NamedTuple):
    """Block ids of one sequence in one cache group, in order of position."""

    group_id: int
    block_ids: list[int]


class Demoted(NamedTuple):
    """Changes of one sequence's block table in one cache group where `length` tokens have KV."""

    group_id: int
    length: int
    positions: list[int]
    block_ids: list[int]
    writes: list[bool]  # whether the executor writes the copy, from the block named before


class BlockCopy(NamedTuple):
    """A block whose content an executor copies to another of the same pool, before it computes."""

    operation_id: int
    pool: Pool
    source: int
    destination: int


class AllowedExecutor(NamedTuple):
    """An executor that a sequence may go to, with its load as the scheduler knows it."""

    executor_id: str
    epoch: int
    running_count: int = 0
    queued_tokens: int = 0
    output_tokens: int = 0  # that the running ones still have before them, as expected; 0 where unknown
    slowness: float = 1.0  # how many times as long as its peers it takes

    def running_beside(self, output_tokens: int) -> float:
        """Sequences that run beside a newcomer on average over so many tokens of its output (0: unknown), at most."""
        _, _, running, _, left, _ = self
        if not output_tokens or not left:
            return running
        beside = (left if left > running else running) / output_tokens
        return beside if beside < running else running


@dataclass(frozen=True, slots=True)
class Reservation:
    """Blocks wanted for a sequence. `tokens` (an array of type "i": prompt and output so far) becomes the holding's."""

    sequence_id: int
    key_space: KeySpace
    tokens: array[int]
    lookahead: int  # further token slots
    executors: Sequence[AllowedExecutor]
    skip_prefix_cache: bool = False
    retention: Retention = NO_RETENTION  # of the prompt's blocks once nobody holds them
    parent_sequence_id: int = 0  # whose KV it begins with; 0 for none
    parent_length: int = 0  # leading tokens of that KV
    most_tokens: int = 0  # slots that it may come to need in all
    output_tokens: int = 0  # that it still has before it, as expected; 0 where unknown

    def problem(self) -> str:
        """What is malformed, field first; empty for nothing."""
        if self.sequence_id <= 0:
            return f"sequence_id: must be positive, not {self.sequence_id}"
        if not self.key_space.model_fingerprint:
            return "model_fingerprint: must be set"
        if not self.tokens:
            return "token_ids: at least one is needed"
        if np.frombuffer(self.tokens, dtype=np.int32).min() < 0:
            return "token_ids: negative token id"
        if self.lookahead < 0:
            return f"lookahead_tokens: must not be negative, not {self.lookahead}"
        if self.most_tokens < 0:
            return f"most_tokens: must not be negative, not {self.most_tokens}"
        if self.key_space.adapter:
            return "adapter: not supported"
        try:
            KvPolicy.parse(self.key_space.kv_policy)
        except ValueError as error:
            return f"kv_policy: {error}"
        if not 0 <= self.retention.priority < PRIORITIES:
            return f"cache_priority: {self.retention.priority} is not within 0 and {PRIORITIES - 1}"
        if self.retention.pin_seconds < 0:
            return "pin_ms: must not be negative"
        return ""


@dataclass(frozen=True, slots=True)
class ReservationAnswer:
    """What became of a reservation; the fields below `reasons` are set where it was granted."""

    sequence_id: int
    outcome: Outcome
    reasons: list[str]
    executor_id: str = ""
    node: int = -1
    tier: int = 0
    format: int = 0
    blocks: Sequence[GroupBlocks] = ()
    cached_tokens: int = 0
    demotions: Sequence[Demoted] = ()
    copies: Sequence[BlockCopy] = ()


def granted(holding: Holding, reasons: list[str], copies: Sequence[BlockCopy] = ()) -> ReservationAnswer:
    """What a scheduler is told of a sequence whose blocks are held from now on."""
    first = holding.place.pools[0].spec
    return ReservationAnswer(
        holding.sequence_id,
        Outcome.GRANTED,
        reasons,
        holding.executor.spec.executor_id,
        holding.place.node,
        first.tier,
        first.format,
        [GroupBlocks(group.pool.spec.group_id, group.block_ids()) for group in holding.groups],
        holding.computed,
        [change for group in holding.groups for change in demoted(group.ages, group.pending)],
        copies,
    )


def add_granted(loads: list[AllowedExecutor], answer: ReservationAnswer, queued_tokens: int) -> None:
    """Brings loads up to date, where a reservation was granted that leaves so many tokens to compute."""
    for index, load in enumerate(loads if answer.outcome == Outcome.GRANTED else ()):
        if load.executor_id == answer.executor_id:
            loads[index] = load._replace(
                running_count=load.running_count + 1, queued_tokens=load.queued_tokens + queued_tokens
            )


@dataclass(frozen=True, slots=True)
class ExtensionAnswer:
    """What became of an extension; `problem` says what was malformed."""

    sequence_id: int
    outcome: Outcome
    blocks: Sequence[GroupBlocks] = ()
    demotions: Sequence[Demoted] = ()
    problem: str = ""


@dataclass(slots=True)
class Restated:
    """A sequence that a scheduler holds from before, as the scheduler knows it.

    `blocks` is the block table as it was granted; `demotions` are all its changes since, by ascending length.
    """

    sequence_id: int
    executor_id: str
    epoch: int
    key_space: KeySpace
    tokens: array[int]  # prompt and output so far
    computed: int
    blocks: Sequence[GroupBlocks]
    demotions: Sequence[Demoted]
    slots: int = 0  # asked for since; 0 for none

    def advance(self, computed: int, token_ids: Sequence[int]) -> None:
        """Progress that came before its executor did."""
        self.tokens.extend(token_ids)
        self.computed = computed

    def problem(self) -> str:
        """What is malformed, field first; empty for nothing."""
        if self.sequence_id <= 0:
            return f"sequence_id: must be positive, not {self.sequence_id}"
        if not self.tokens or np.frombuffer(self.tokens, dtype=np.int32).min() < 0:
            return "token_ids: at least one is needed, and none may be negative"
        if not 0 <= self.computed <= len(self.tokens):
            return f"computed_length: {self.computed} of {len(self.tokens)} tokens"
        if len({group.group_id for group in self.blocks}) != len(self.blocks):
            return "blocks: a group is named twice"
        if any(not len(c.positions) == len(c.block_ids) == len(c.writes) for c in self.demotions):
            return "demotions: parallel fields differ in length"
        lengths = [change.length for change in self.demotions]
        if lengths != sorted(lengths):
            return "demotions: not by ascending length"
        return ""


def demoted(ages: Sequence[Pool], demotions: Iterable[Demotion]) -> list[Demoted]:
    """Changes of one cache group's table, by ascending length, as schedulers and executors hear of them."""
    group_id = ages[0].spec.group_id
    by_length = itertools.groupby(demotions, key=attrgetter("length"))
    return [
        Demoted(
            group_id,
            length,
            [d.position for d in together],
            [ages[d.age].spec.first_block_id + d.block for d in together],
            [d.writes for d in together],
        )
        for length, together in ((length, list(group)) for length, group in by_length)
    ]
