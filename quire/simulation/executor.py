"""A modelled executor: takes plans and gives results as the real one does; its steps take what a cost model says.

Credit and what is reported when are the real executor's own code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from quire.simulation.drafts import Drafts, Luck
from quire.simulation.timeline import Timeline
from quire.v1 import executor_pb2, types_pb2
from services.common.errors import QuireError, Reason
from services.common.topology import LOCAL_DISTANCE
from services.executor.admission import check_plan
from services.executor.cost_model import CostModel, StepShape
from services.executor.credit import Credit
from services.executor.results import Ledger, StepTaken
from services.executor.sequences import Drafted, Sequence, Unreported

STOP, LENGTH = types_pb2.FINISH_REASON_STOP, types_pb2.FINISH_REASON_LENGTH
END_TOKEN, OUTPUT_TOKEN = 0, 1
COPY = executor_pb2.BLOCK_OPERATION_KIND_COPY


@dataclass(slots=True)
class Work:
    """What an executor did, in sums."""

    steps: int = 0
    rows: int = 0
    tokens: int = 0  # that got KV, prompt and output
    proposed: int = 0  # drafts
    accepted: int = 0
    busy_seconds: float = 0.0
    held_slot_seconds: float = 0.0  # token slots held, times how long
    filled_slot_seconds: float = 0.0  # those with KV


class ModelledSequence(Sequence):
    """A sequence of which only lengths are known. Its seed says how long its answer is."""

    __slots__ = ("distance", "end", "known", "luck", "most", "reason", "slots")

    def __init__(self, state: executor_pb2.SequenceState, slots: int, distance: float, chance: float) -> None:
        """`chance`: of each of its drafts."""
        self.sequence_id = state.sequence_id
        self.computed = state.computed_length
        self.known = len(state.token_ids)  # prompt and output
        answer = state.sampling.seed
        self.reason = STOP if answer < state.stop.max_tokens else LENGTH
        self.end = state.prompt_length + min(answer, state.stop.max_tokens)
        self.most = state.prompt_length + state.stop.max_tokens
        self.luck = Luck(chance, f"{state.request_id} {state.choice} {self.known}")
        self.slots = slots  # tokens that its blocks hold
        self.distance = distance  # how many times as long reading its blocks takes as reading near ones
        self.credit = Credit()
        self.unreported = Unreported()
        self.spoke = False


class Row(NamedTuple):
    """A sequence's part of a step."""

    sequence: ModelledSequence
    known: int  # tokens
    drafts: int = 0  # behind them


class ModelledExecutor:
    """One executor. Plans that come while a step is computed are taken in after it."""

    def __init__(
        self,
        timeline: Timeline,
        description: types_pb2.ExecutorDescription,
        cost: CostModel,
        stolen: Callable[[], float],
        drafts: Drafts | None = None,
    ) -> None:
        """`stolen` gives the seconds that others computed on this executor's cores since the last call."""
        self.timeline = timeline
        self.description = description
        self.sequences: dict[int, ModelledSequence] = {}
        self.work = Work()
        self.slowdown = 1.0
        self.send: Callable[[executor_pb2.StepResults], None] = lambda results: None
        self._cost = cost
        self._stolen = stolen
        self._drafts = drafts
        self._block_size = description.groups[0].block_size
        self._pools = [(pool.first_block_id, pool.distance) for pool in description.pools]
        self._ledger = Ledger(0)
        self._plans: list[executor_pb2.StepPlan] = []
        self._is_computing = False
        self._slots = self._filled = 0  # of all sequences
        self._rested_at = 0.0

    @property
    def epoch(self) -> int:
        return self._ledger.epoch

    def open(self) -> executor_pb2.RunWelcome:
        """Fences the present epoch and opens the next; no sequence stays."""
        self._ledger = Ledger(self._ledger.epoch + 1)
        self.sequences.clear()
        self._plans.clear()
        self._slots = self._filled = 0
        return executor_pb2.RunWelcome(epoch=self._ledger.epoch, description=self.description)

    def receive(self, plan: executor_pb2.StepPlan) -> None:
        """Takes a plan in, at once where nothing is being computed. Raises as the real executor does."""
        self._plans.append(plan)
        if not self._is_computing:
            if self.sequences:
                self._ledger.idled(self.timeline.now - self._rested_at)
            self._go_on()

    def _go_on(self) -> None:
        plans, self._plans = self._plans, []
        for plan in plans:
            self._take(plan)
        rows = self._choose_rows()
        if not rows:
            self._rested_at = self.timeline.now
            if (message := self._ledger.before_rest()) is not None:
                self.send(message)
            return
        self._is_computing = True
        shape = self._shape(rows)
        drafting = 0.0
        if self._drafts is not None:
            proposing = [(sequence.known, drafts) for sequence, _, drafts in rows if drafts]
            drafting = self._drafts.seconds(self._cost, proposing) * self.slowdown
        seconds = self._cost.seconds(shape) * self.slowdown + drafting + self._stolen()
        self.timeline.at(self.timeline.now + seconds, self._finish, self._ledger, rows, seconds, drafting)

    def _finish(self, ledger: Ledger, rows: list[Row], seconds: float, drafting: float) -> None:
        self._is_computing = False
        tokens = sampled = proposed = accepted = rounds = 0
        for sequence, count, drafts in rows:
            tokens += count
            proposed += drafts
            rounds = max(rounds, drafts)
            sampled += sequence.computed + count == sequence.known
        self._count(len(rows), tokens, seconds)
        if ledger is self._ledger:  # else the step belongs to an epoch that is over
            for row in rows:
                if self.sequences.get(row.sequence.sequence_id) is row.sequence:
                    accepted += self._advance(row)
            ledger.step_taken(StepTaken(seconds, 0.0, tokens + proposed, sampled, proposed, rounds, drafting))
        self.work.tokens += accepted
        self.work.proposed += proposed
        self.work.accepted += accepted
        if ledger is self._ledger and (message := ledger.after_step()) is not None:
            self.send(message)
        self._go_on()

    def _advance(self, row: Row) -> int:
        """Takes in a computed row; drafts that were accepted."""
        sequence, count, drafts = row
        news, admits = sequence.unreported, sequence.credit.draft_limit > 0
        sequence.credit.use()
        news.steps += 1
        comes = sequence.computed + count == sequence.known
        accepted = min(sequence.luck.accepted(drafts), sequence.end - sequence.known - 1) if comes else 0
        sequence.credit.drafts -= accepted
        sequence.computed += count + accepted
        self._filled += count + accepted
        if admits:
            news.drafted.append(Drafted(drafts, accepted))
        if not comes:
            self._ledger.computed(sequence)
            return 0
        sequence.known += 1 + accepted
        news.token_ids += [OUTPUT_TOKEN] * accepted
        if sequence.known < sequence.end:
            news.token_ids.append(OUTPUT_TOKEN)
            self._ledger.computed(sequence)
        else:
            last = END_TOKEN if sequence.reason == STOP else OUTPUT_TOKEN
            news.token_ids.append(last)
            self._remove(sequence)
            self._ledger.ended(sequence, sequence.reason, last if sequence.reason == STOP else None, None)
        return accepted

    def _take(self, plan: executor_pb2.StepPlan) -> None:
        check_plan(plan, self._ledger.epoch, self._ledger.last_plan)
        moves = [operation for operation in plan.operations if operation.kind != COPY]  # a copy takes next to no time
        if moves or plan.demotions:
            raise QuireError(Reason.UNSUPPORTED, "modelled executors keep all blocks hot, on the device")
        self._ledger.plan_taken(plan)
        for sequence_id in plan.ended_sequence_ids:
            ended = self.sequences.get(sequence_id)
            if ended is not None:
                self._remove(ended)
                self._ledger.forgotten(ended)
        for append in plan.append:
            gaining = self.sequences.get(append.sequence_id)
            if gaining is not None:
                gained = sum(len(blocks.block_ids) for blocks in append.blocks) * self._block_size
                gaining.slots += gained
                self._slots += gained
        for state in plan.enter:
            self._enter(state)
        grants = (plan.sequence_ids, plan.token_limits, plan.step_counts, plan.draft_limits, plan.draft_credits)
        for sequence_id, limit, steps, drafts, credit in zip(*grants, strict=True):
            granted = self.sequences.get(sequence_id)
            if granted is not None:
                granted.credit.add(limit, steps, drafts, credit)

    def _enter(self, state: executor_pb2.SequenceState) -> None:
        blocks = state.blocks[0].block_ids
        chance = self._drafts.chance(state.request_id) if self._drafts is not None else 0.0
        sequence = ModelledSequence(state, len(blocks) * self._block_size, self._distance(blocks[0]), chance)
        if sequence.sequence_id in self.sequences:
            raise QuireError(Reason.PROTOCOL, "enter: a sequence id is in use")
        self.sequences[sequence.sequence_id] = sequence
        self._slots += sequence.slots
        self._filled += sequence.computed

    def _remove(self, sequence: ModelledSequence) -> None:
        del self.sequences[sequence.sequence_id]
        self._slots -= sequence.slots
        self._filled -= sequence.computed

    def _choose_rows(self) -> list[Row]:
        """Every sequence with credit, up to the limits of a step, and how many tokens of it, as the real one does."""
        most, left = self.description.max_sequences, self.description.max_step_tokens
        rows: list[Row] = []
        is_crowded = False
        for sequence in self.sequences.values():
            if not sequence.credit.steps:
                continue
            count = sequence.known - sequence.computed
            if count > 1:
                count = min(count, sequence.credit.token_limit, self.description.max_step_tokens)
            if sequence.computed + count > sequence.slots:
                continue
            if count > left or len(rows) == most:
                is_crowded = True
                continue
            rows.append(Row(sequence, count))
            left -= count
        if is_crowded:  # the others go first next time
            for row in rows:
                self.sequences[row.sequence.sequence_id] = self.sequences.pop(row.sequence.sequence_id)
        return rows if self._drafts is None else self._add_drafts(rows, left)

    def _add_drafts(self, rows: list[Row], left: int) -> list[Row]:
        """As many as are granted and have room, in the step, the blocks and the budget."""
        with_drafts = []
        for row in rows:
            sequence, end = row.sequence, row.sequence.computed + row.known
            room = 0
            if sequence.credit.draft_limit and end == sequence.known:
                credit = sequence.credit
                limits = (credit.draft_limit, credit.drafts, left, sequence.slots - end, sequence.most - end - 1)
                room = max(0, min(limits))
            left -= room
            with_drafts.append(row._replace(drafts=room))
        return with_drafts

    def _shape(self, rows: list[Row]) -> StepShape:
        decode_rows = prompt_tokens = prompt_pairs = 0
        context_tokens = 0.0
        for sequence, count, drafts in rows:
            if count == 1:
                decode_rows += 1
                context_tokens += (sequence.computed + 1) * sequence.distance
                prompt_tokens += drafts
                prompt_pairs += drafts * (sequence.computed + 1) + drafts * (drafts + 1) // 2
            else:
                prompt_tokens += count
                prompt_pairs += count * sequence.computed + count * (count + 1) // 2
        return StepShape(decode_rows, round(context_tokens), prompt_tokens, prompt_pairs)

    def _count(self, rows: int, tokens: int, seconds: float) -> None:
        work = self.work
        work.steps += 1
        work.rows += rows
        work.tokens += tokens
        work.busy_seconds += seconds
        work.held_slot_seconds += self._slots * seconds
        work.filled_slot_seconds += self._filled * seconds

    def _distance(self, block_id: int) -> float:
        """Of the pool that a block lies in, as a multiple of a near one's."""
        distance = next((d for first, d in reversed(self._pools) if block_id >= first), 0)
        return max(distance, LOCAL_DISTANCE) / LOCAL_DISTANCE


class PaddedExecutor(ModelledExecutor):
    """Computes a row for every sequence of a batch until the last one has ended, as without continuous batching."""

    _padding_rows = 0
    _padding_context = 0

    def _remove(self, sequence: ModelledSequence) -> None:
        super()._remove(sequence)
        if self.sequences:
            self._padding_rows += 1
            self._padding_context += sequence.computed
        else:
            self._padding_rows = self._padding_context = 0

    def _shape(self, rows: list[Row]) -> StepShape:
        shape = super()._shape(rows)
        self._padding_context += self._padding_rows
        return shape._replace(
            decode_rows=shape.decode_rows + self._padding_rows,
            context_tokens=shape.context_tokens + self._padding_context,
        )
