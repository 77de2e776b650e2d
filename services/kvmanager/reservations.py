"""What schedulers ask for and what they get, apart from the wire."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from services.kvmanager.keys import KeySpace
from services.kvmanager.placement import Outcome


class GroupBlocks(NamedTuple):
    """Block ids of one sequence in one cache group, in order of position."""

    group_id: int
    block_ids: list[int]


class AllowedExecutor(NamedTuple):
    """An executor that a sequence may go to, with its load as the scheduler knows it."""

    executor_id: str
    epoch: int
    running_count: int = 0
    queued_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Reservation:
    """Blocks wanted for a sequence. `tokens` (an array of type "i": prompt and output so far) becomes the holding's."""

    sequence_id: int
    key_space: KeySpace
    tokens: array[int]
    lookahead: int  # further token slots
    executors: Sequence[AllowedExecutor]
    skip_prefix_cache: bool = False

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
        if self.key_space.adapter:
            return "adapter: not supported"
        if self.key_space.kv_policy:
            return f"kv_policy: {self.key_space.kv_policy} is not supported; empty is hot only"
        names = [executor.executor_id for executor in self.executors]
        if len(set(names)) != len(names):
            return "executors: named twice"
        if any(executor.running_count < 0 or executor.queued_tokens < 0 for executor in self.executors):
            return "executors: negative load"
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


@dataclass(frozen=True, slots=True)
class ExtensionAnswer:
    """What became of an extension; `problem` says what was malformed."""

    sequence_id: int
    outcome: Outcome
    blocks: Sequence[GroupBlocks] = ()
    problem: str = ""
