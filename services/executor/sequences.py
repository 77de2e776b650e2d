"""A sequence as its executor knows it: tokens, how many have KV, credit, and what is still to be reported."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from quire.v1.types_pb2 import FinishReason
from services.executor.backends.base import Sampled, SampleRow, SamplingRule, TokenScores
from services.executor.credit import Credit
from services.executor.demotions import Demotions

UNSPECIFIED, STOP = FinishReason.FINISH_REASON_UNSPECIFIED, FinishReason.FINISH_REASON_STOP
LENGTH, ERROR = FinishReason.FINISH_REASON_LENGTH, FinishReason.FINISH_REASON_ERROR


@dataclass(frozen=True, slots=True)
class Ending:
    """When the executor ends a sequence itself."""

    end_ids: frozenset[int]  # stop ids, and the model's end tokens unless ignored
    max_output: int  # tokens in all, limited by the context


@dataclass(slots=True)
class Unreported:
    """What happened to a sequence since its last results message."""

    token_ids: list[int] = field(default_factory=list)
    steps: int = 0
    output_scores: list[TokenScores] = field(default_factory=list)
    prompt_scores: list[TokenScores] = field(default_factory=list)
    prompt_start: int = 0


class Sequence:
    """Mutable; owned by the step thread."""

    __slots__ = (
        "computed",
        "credit",
        "demotions",
        "ending",
        "output",
        "sample_row",
        "sequence_id",
        "spoke",
        "table",
        "tokens",
        "unreported",
        "waits_aloud",
    )

    def __init__(
        self,
        sequence_id: int,
        token_ids: list[int],
        prompt_length: int,
        computed: int,
        rule: SamplingRule,
        ending: Ending,
    ) -> None:
        self.sequence_id = sequence_id
        self.tokens = array("i", token_ids)  # prompt and output
        self.computed = computed  # tokens with KV
        self.ending = ending
        self.credit = Credit()
        self.table = -1  # its row in the block tables
        self.demotions: Demotions | None = None  # None where none lies ahead
        self.output = token_ids[prompt_length:]
        self.sample_row = SampleRow(0, rule, array("i", token_ids[:prompt_length]), self.output)
        self.unreported = Unreported()
        self.spoke = False  # whether a token was drawn since it entered
        self.waits_aloud = False  # whether its lack of blocks was logged

    @property
    def rule(self) -> SamplingRule:
        return self.sample_row.rule

    @property
    def prompt_length(self) -> int:
        return len(self.sample_row.prompt_ids)

    @property
    def remaining(self) -> int:
        """Known tokens without KV: at least 1 while it runs."""
        return len(self.tokens) - self.computed

    def append(self, sampled: Sampled) -> FinishReason.ValueType:
        """Takes the drawn token in and says whether it ends the sequence (UNSPECIFIED: it goes on)."""
        token_id = sampled.token_id
        self.tokens.append(token_id)
        self.output.append(token_id)
        self.unreported.token_ids.append(token_id)
        if sampled.scores is not None:
            self.unreported.output_scores.append(sampled.scores)
        if token_id in self.ending.end_ids:
            return STOP
        if len(self.output) >= self.ending.max_output:
            return LENGTH
        return UNSPECIFIED
