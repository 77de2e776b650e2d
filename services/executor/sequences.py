"""A sequence as its executor knows it: tokens, how many have KV, credit, and what is still to be reported."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

from quire.v1.types_pb2 import FinishReason
from services.executor.backends.base import Sampled, SampleRow, SamplingRule, TokenScores
from services.executor.credit import Credit
from services.executor.demotions import Demotions
from services.executor.embedding import Embedding
from services.executor.grammar.guide import Guide

UNSPECIFIED, STOP = FinishReason.FINISH_REASON_UNSPECIFIED, FinishReason.FINISH_REASON_STOP
LENGTH, ERROR = FinishReason.FINISH_REASON_LENGTH, FinishReason.FINISH_REASON_ERROR


@dataclass(frozen=True, slots=True)
class Ending:
    """When the executor ends a sequence itself."""

    end_ids: frozenset[int]  # stop ids, and the model's end tokens unless ignored
    max_output: int  # tokens in all, limited by the context


@dataclass(slots=True)
class Drafted:
    """Drafts of one step."""

    proposed: int
    accepted: int = 0  # the leading ones that became output
    is_behind: bool = False  # nothing could be proposed yet


@dataclass(slots=True)
class Unreported:
    """What happened to a sequence since its last results message."""

    token_ids: list[int] = field(default_factory=list)
    steps: int = 0
    output_scores: list[TokenScores] = field(default_factory=list)
    prompt_scores: list[TokenScores] = field(default_factory=list)
    prompt_start: int = 0
    drafted: list[Drafted] = field(default_factory=list)  # of each step that might draft
    embedding: list[float] | None = None


class Sequence:
    """Mutable; owned by the step thread."""

    __slots__ = (
        "computed",
        "credit",
        "demotions",
        "drafting",
        "embedding",
        "ending",
        "guide",
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
        guide: Guide | None = None,
        embedding: Embedding | None = None,
    ) -> None:
        self.sequence_id = sequence_id
        self.tokens = array("i", token_ids)  # prompt and output
        self.computed = computed  # tokens with KV
        self.ending = ending
        self.guide = guide  # where its output must obey a rule
        self.embedding = embedding  # where its prompt becomes a vector: it has no output then
        self.credit = Credit()
        self.table = -1  # its row in the block tables
        self.demotions: Demotions | None = None  # None where none lies ahead
        self.output = token_ids[prompt_length:]
        self.sample_row = SampleRow(0, rule, array("i", token_ids[:prompt_length]), self.output)
        self.unreported = Unreported()
        self.drafting: object = None  # what the proposer keeps with the sequence; nobody else touches it
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

    @property
    def awaits_grammar(self) -> bool:
        """Whether nothing can be drawn yet."""
        return self.guide is not None and self.guide.is_pending

    @property
    def most_drafts(self) -> int:
        """Drafts that may become output beside the next token."""
        return self.ending.max_output - len(self.output) - 1

    def take(self, sampled: Iterable[Sampled | None]) -> FinishReason.ValueType | None:
        """Takes in what a step drew: the token after those known, and one after each draft.

        Each draft that is what was drawn in its place makes the next token count. Says whether the output has ended
        (UNSPECIFIED: it goes on); None, with nothing more taken in, where a token that counts could not be drawn.
        """
        drafts = self.sample_row.draft_ids
        accepted, reason = 0, UNSPECIFIED
        for place, drawn in enumerate(sampled):
            if drawn is None:
                self.computed = len(self.tokens)
                return None
            reason = self._append(drawn)
            if place == len(drafts) or drafts[place] != drawn.token_id:
                break
            accepted += 1
            if reason != UNSPECIFIED:
                break
        self.computed = len(self.tokens) - 1
        if drafts:
            self.unreported.drafted[-1].accepted = accepted
            self.credit.drafts -= accepted
        return reason

    def _append(self, sampled: Sampled) -> FinishReason.ValueType:
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
