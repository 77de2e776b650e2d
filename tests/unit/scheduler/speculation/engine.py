"""A batch that decodes with drafts, by a model of costs and of acceptance: what a controller is measured against."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from quire.v1 import types_pb2
from services.scheduler.speculation.acceptance import Habit
from services.scheduler.speculation.controller import Controller, Drafting

Seconds = Callable[[float], float]
"""Of a step, by its tokens."""


@dataclass
class Engine:
    """Sequences whose drafts are right with a given probability each, at every position alike."""

    chances: Sequence[float]
    step: Seconds
    draft_part: float = 0.0  # of a step over those it proposes for, to propose one for each
    proposes: float = 1.0  # how often anything is proposed
    noise: float = 0.0
    stated: tuple[float, float] | None = None  # seconds of a token's step and tokens of prefill per second, as claimed
    grant_seconds: float = 0.020
    seed: int = 1
    now: float = 0.0
    tokens: int = 0
    most: int = 16
    habits: list[Habit] = field(default_factory=list)
    limits: list[list[int]] = field(default_factory=list)  # of each grant, by sequence

    def __post_init__(self) -> None:
        self._draw = random.Random(self.seed)

    def describe(self) -> types_pb2.ExecutorDescription:
        step, rate = self.stated or (self.step(1), 512 / self.step(512))
        return types_pb2.ExecutorDescription(
            max_step_tokens=512,
            decode_step_seconds=step,
            prefill_tokens_per_second=rate,
            speculation=types_pb2.SpeculationDescription(
                proposer="draft", max_draft_tokens=16, draft_token_seconds=self.draft_part * self.step(1)
            ),
        )

    def rate(self, limits: Sequence[int]) -> float:
        """Tokens per second that these draft limits give in theory, where something is always proposed."""
        tokens = sum(
            sum(chance**k for k in range(limit + 1)) for chance, limit in zip(self.chances, limits, strict=True)
        )
        drafting = sum(self.step(sum(limit > k for limit in limits)) for k in range(max(limits)))
        return tokens / (self.step(len(limits) + sum(limits)) + self.draft_part * drafting)

    def run(self, controller: Controller, seconds: float) -> float:
        """Tokens per second over so much time from now."""
        if len(self.habits) != len(self.chances):
            self.habits = [Habit(self.most) for _ in self.chances]
        habits, draw = self.habits, self._draw
        start, before = self.now, self.tokens
        while self.now < start + seconds:
            steps = max(2, min(32, round(self.grant_seconds / self.step(len(habits)))))
            grant = controller.grant(habits, [steps] * len(habits), self.now)
            limits = [grant.drafts(habit) for habit in habits]
            self.limits.append(limits)
            proposed_count, drafting_steps, rounds, spent, drafting = 0, 0, 0, 0.0, 0.0
            for step in range(steps):
                proposed_in_step, by_position = 0, [0] * 16
                for habit, limit, chance in zip(habits, limits, self.chances, strict=True):
                    if habit is grant.probed and step >= grant.probe_steps:
                        limit = 0
                    self.tokens += 1
                    if not limit:
                        continue
                    proposed = limit if draw.random() < self.proposes else 0
                    accepted = 0
                    while accepted < proposed and draw.random() < chance:
                        accepted += 1
                    self.tokens += accepted
                    proposed_in_step += proposed
                    for position in range(proposed):
                        by_position[position] += 1
                    controller.acceptance.add(habit, limit, proposed, accepted)
                proposed_count += proposed_in_step
                drafting_steps += proposed_in_step > 0
                rounds += sum(count > 0 for count in by_position)
                drafting += self.draft_part * sum(self.step(count) for count in by_position if count)
                spent += self.step(len(habits) + proposed_in_step) * draw.uniform(1 - self.noise, 1 + self.noise)
            self.now += spent + drafting
            drafted = Drafting(drafting_steps, proposed_count, rounds, drafting)
            controller.observe(steps, steps * len(habits), drafted, spent + drafting)
        return (self.tokens - before) / (self.now - start)
