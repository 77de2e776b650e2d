"""What a step gave, on its way to the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from kernels.token_sampler import TokenScores as DeviceScores
from services.executor.backends.base import (
    PooledRows,
    PromptScoreRows,
    Sampled,
    SampleRow,
    StepOutputs,
    TokenScores,
)
from services.executor.backends.cuda.device import Device, Mark


@dataclass(frozen=True, slots=True)
class HostScores:
    """Scores of some rows."""

    chosen: Tensor
    ranks: Tensor
    top_ids: Tensor
    top_logprobs: Tensor

    @classmethod
    def fetch(cls, device: Device, scores: DeviceScores) -> HostScores:
        """There once a later mark was waited for."""
        parts = (scores.chosen, scores.ranks, scores.top_ids, scores.top_logprobs)
        return cls(*map(device.fetch, parts))

    def add(self, row: int, count: int, to: TokenScores) -> None:
        """Adds one row, with `count` alternatives at most."""
        to.chosen.append(float(self.chosen[row]))
        to.ranks.append(int(self.ranks[row]))
        to.top_ids.append(self.top_ids[row, :count].tolist())
        to.top_logprobs.append(self.top_logprobs[row, :count].tolist())


@dataclass(frozen=True, slots=True)
class Pending:
    """A step under way."""

    samples: Sequence[SampleRow]
    counts: Sequence[int]  # tokens drawn for each sample
    drawn: Tensor | None  # [R] int32, on the host once `mark` was waited for; None: nothing is drawn
    scores: HostScores | None  # of the tokens of samples that want them, in their order
    prompt_scores: Sequence[tuple[PromptScoreRows, Sequence[HostScores]]]
    mark: Mark
    pooled: Sequence[tuple[PooledRows, Tensor]] = ()  # with the states [count, H] to be added

    def token_ids(self) -> list[int]:
        """[R] what was drawn; waits for it."""
        self.mark.wait()
        found: list[int] = [] if self.drawn is None else self.drawn.tolist()
        return found

    def outputs(self) -> StepOutputs:
        """Waits for the step."""
        token_ids = iter(self.token_ids())
        sampled: list[Sampled | None] = []
        scored = 0
        for sample, count in zip(self.samples, self.counts, strict=True):
            wanted = sample.rule.logprob_count
            for _ in range(count):
                token_id = next(token_ids)
                scores = None
                if wanted >= 0 and self.scores is not None:
                    scores = TokenScores([], [], [], [])
                    self.scores.add(scored, wanted, scores)
                    scored += 1
                sampled.append(Sampled(token_id, scores) if token_id >= 0 else None)
        for part, states in self.pooled:
            for row in states.double().numpy():  # in order: a sum must not depend on chunks
                part.total += row
        return StepOutputs(sampled, [_joined(wanted, parts) for wanted, parts in self.prompt_scores])


def _joined(wanted: PromptScoreRows, parts: Sequence[HostScores]) -> TokenScores:
    found = TokenScores([], [], [], [])
    for part in parts:
        for row in range(len(part.chosen)):
            part.add(row, wanted.count, found)
    return found
