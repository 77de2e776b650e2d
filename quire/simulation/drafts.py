"""Modelled drafts: how often they are accepted, and what proposing them takes."""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from quire.v1 import types_pb2
from services.common.speculation import MAX_DRAFT_TOKENS
from services.executor.cost_model import CostModel, StepShape


@dataclass(frozen=True, slots=True)
class Drafts:
    """A draft model: a request's drafts are accepted with one of these chances each, at every position alike."""

    acceptances: tuple[float, ...]  # 0 to 1; requests are spread over them
    cost: float  # seconds of one of its steps, as a part of the target's

    def chance(self, request_id: str) -> float:
        """Of a request: the same in every run."""
        return self.acceptances[zlib.crc32(request_id.encode()) % len(self.acceptances)]

    def seconds(self, cost: CostModel, proposed: Sequence[tuple[int, int]]) -> float:
        """Of proposing one draft after the other, for sequences of so many tokens each: (tokens, drafts)."""
        total = 0.0
        for position in range(max((count for _, count in proposed), default=0)):
            contexts = [context + position for context, count in proposed if count > position]
            total += cost.seconds(StepShape(len(contexts), sum(contexts), 0, 0))
        return self.cost * total

    def describe(self, step_seconds: float) -> types_pb2.SpeculationDescription:
        """As an executor states it, whose own step of one token takes so long."""
        return types_pb2.SpeculationDescription(
            proposer="draft",
            max_draft_tokens=MAX_DRAFT_TOKENS,
            draft="modelled",
            draft_token_seconds=self.cost * step_seconds,
        )


class Luck:
    """Which drafts of one sequence are accepted."""

    __slots__ = ("_chance", "_draw")

    def __init__(self, chance: float, name: str) -> None:
        self._chance = chance
        self._draw = random.Random(name)

    def accepted(self, proposed: int) -> int:
        """Of so many drafts, the leading ones that are right."""
        for count in range(proposed):
            if self._draw.random() >= self._chance:
                return count
        return proposed
