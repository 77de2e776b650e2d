"""What is sent when: unreported outcomes, packed messages, and messages kept until acknowledged.

First tokens and ends leave at once, alone. Everything else waits until some sequence's remaining credit falls to the
plan's report_credit or to 0 (a sequence without output leaves alone, at 1 already), until the steps since all was told
took the plan's report_seconds, or until nothing can be computed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from quire.v1 import executor_pb2, types_pb2
from services.common.errors import QuireError
from services.executor.backends.base import TokenScores
from services.executor.sequences import Sequence, Unreported

Results = executor_pb2.StepResults


@dataclass(frozen=True, slots=True)
class StepTaken:
    """What a step took and computed."""

    compute_seconds: float
    host_seconds: float
    tokens: int
    sampled: int  # sequences that a next token was drawn for
    drafts: int = 0  # of the tokens
    draft_rounds: int = 0  # of proposing: the most drafts of one sequence
    draft_seconds: float = 0.0  # of computing, for proposing them
    catch_up_seconds: float = 0.0  # of computing, for what proposes to take texts in


class Ledger:
    """Results of one epoch. Mutable; owned by the step thread."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.last_plan = 0
        self.last_step = 0
        self.report_credit = 0
        self.report_seconds = 0.0
        self.unacknowledged: deque[Results] = deque()
        self._sent = 0
        self._changed: dict[int, Sequence] = {}
        self._urgent: dict[int, Sequence] = {}
        self._ended: list[executor_pb2.SequenceEnd] = []
        self._done_operations: list[int] = []
        self._due = False
        self._unanswered = False  # a plan came that no message answers yet
        self._timings = executor_pb2.StepTimings()
        self._gathered_seconds = 0.0  # of steps since all was told

    def plan_taken(self, plan: executor_pb2.StepPlan) -> None:
        self.last_plan = plan.step
        self.report_credit, self.report_seconds = plan.report_credit, plan.report_seconds
        while self.unacknowledged and self.unacknowledged[0].sequence_number <= plan.acknowledged_results:
            self.unacknowledged.popleft()
        # A bare acknowledgement is not answered, or the two sides would never fall silent.
        if plan.enter or plan.sequence_ids or plan.append or plan.ended_sequence_ids or plan.operations or plan.sealed:
            self._unanswered = True

    def step_taken(self, taken: StepTaken) -> None:
        self.last_step += 1
        timings = self._timings
        timings.step_count += 1
        timings.compute_seconds += taken.compute_seconds
        timings.host_seconds += taken.host_seconds
        timings.draft_seconds += taken.draft_seconds
        timings.catch_up_seconds += taken.catch_up_seconds
        timings.token_count += taken.tokens
        timings.sampled_count += taken.sampled
        timings.draft_count += taken.drafts
        timings.draft_step_count += taken.drafts > 0
        timings.draft_round_count += taken.draft_rounds
        self._gathered_seconds += taken.compute_seconds + taken.host_seconds

    def idled(self, seconds: float) -> None:
        self._timings.idle_seconds += seconds

    def moved(self, byte_count: int, seconds: float) -> None:
        """Notes a move of a block to or from a lower tier that ended."""
        self._timings.moved_bytes += byte_count
        self._timings.move_seconds += seconds

    def computed(self, sequence: Sequence) -> None:
        """Notes one step of a sequence, its credit already used and its token taken in."""
        self._changed[sequence.sequence_id] = sequence
        steps = sequence.credit.steps
        low = steps == 0 or steps == self.report_credit
        if sequence.spoke:
            if low:
                self._due = True
            return
        sequence.spoke = bool(sequence.unreported.token_ids)
        # A prefill's progress must not flush what all others are still gathering; its next chunk must come in time.
        if sequence.spoke or low or steps == 1:
            self._urgent[sequence.sequence_id] = sequence

    def ended(
        self,
        sequence: Sequence,
        reason: types_pb2.FinishReason.ValueType,
        stop_token_id: int | None,
        error: QuireError | None,
    ) -> None:
        self._changed[sequence.sequence_id] = self._urgent[sequence.sequence_id] = sequence
        detail = error.to_detail() if error is not None else None
        self._ended.append(
            executor_pb2.SequenceEnd(
                sequence_id=sequence.sequence_id, reason=reason, stop_token_id=stop_token_id, error=detail
            )
        )

    def refused(self, sequence_id: int, error: QuireError) -> None:
        """Notes a sequence that could not enter."""
        self._ended.append(
            executor_pb2.SequenceEnd(
                sequence_id=sequence_id, reason=types_pb2.FINISH_REASON_ERROR, error=error.to_detail()
            )
        )

    def forgotten(self, sequence: Sequence) -> None:
        """Drops what is unreported of a sequence that its scheduler ended."""
        self._changed.pop(sequence.sequence_id, None)
        self._urgent.pop(sequence.sequence_id, None)

    def operations_done(self, operation_ids: list[int]) -> None:
        self._done_operations += operation_ids

    def after_step(self) -> Results | None:
        """What must leave between two steps."""
        if self._due or self._waited:
            return self._message(self._changed.values())
        if self._urgent or self._ended or self._done_operations:
            return self._message(self._urgent.values())
        return None

    def before_rest(self) -> Results | None:
        """What must leave when nothing can be computed: everything, and an answer to plans that led to no step."""
        if self._changed or self._ended or self._done_operations or self._unanswered:
            return self._message(self._changed.values())
        return None

    @property
    def _waited(self) -> bool:
        """Whether tokens have waited long enough."""
        if not self.report_seconds or self._gathered_seconds < self.report_seconds:
            return False
        return any(sequence.unreported.token_ids for sequence in self._changed.values())

    def _message(self, sequences: Iterable[Sequence]) -> Results:
        self._sent += 1
        message = Results(
            epoch=self.epoch,
            sequence_number=self._sent,
            last_plan=self.last_plan,
            last_step=self.last_step,
            ended=self._ended,
            done_operation_ids=self._done_operations,
            timings=self._timings,
        )
        told = list(sequences)
        unreported = [sequence.unreported for sequence in told]
        message.sequence_ids.extend([sequence.sequence_id for sequence in told])
        message.computed_lengths.extend([sequence.computed for sequence in told])
        message.token_counts.extend([len(news.token_ids) for news in unreported])
        message.step_counts.extend([news.steps for news in unreported])
        if any(news.drafted for news in unreported):
            message.draft_step_counts.extend([len(news.drafted) for news in unreported])
            message.proposed_counts.extend([step.proposed for news in unreported for step in news.drafted])
            message.accepted_counts.extend([step.accepted for news in unreported for step in news.drafted])
            behind = [step.is_behind for news in unreported for step in news.drafted]
            if any(behind):
                message.behind.extend(behind)
        for sequence, news in zip(told, unreported, strict=True):
            message.token_ids.extend(news.token_ids)
            if news.output_scores or news.prompt_scores:
                message.logprobs.append(_logprobs(sequence.sequence_id, news))
            if news.embedding is not None:
                message.embeddings.add(sequence_id=sequence.sequence_id, values=news.embedding)
            sequence.unreported = Unreported()
        if len(told) == len(self._changed):
            self._changed.clear()
            self._due, self._gathered_seconds = False, 0.0
        else:
            for sequence in told:
                del self._changed[sequence.sequence_id]
        self._urgent.clear()
        self._ended, self._done_operations = [], []
        self._unanswered = False
        self._timings = executor_pb2.StepTimings()
        self.unacknowledged.append(message)
        return message


def _logprobs(sequence_id: int, news: Unreported) -> executor_pb2.SequenceLogprobs:
    return executor_pb2.SequenceLogprobs(
        sequence_id=sequence_id,
        output=_packed(news.output_scores),
        prompt=_packed(news.prompt_scores),
        prompt_start=news.prompt_start,
    )


def _packed(scores: list[TokenScores]) -> types_pb2.TokenLogprobs | None:
    if not scores:
        return None
    packed = types_pb2.TokenLogprobs(top_count=len(scores[0].top_ids[0]))
    for part in scores:
        packed.chosen.extend(part.chosen)
        packed.ranks.extend(part.ranks)
        for ids, values in zip(part.top_ids, part.top_logprobs, strict=True):
            packed.top_token_ids.extend(ids)
            packed.top_logprobs.extend(values)
    return packed
