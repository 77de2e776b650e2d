"""The executor's decisions between two steps: plans in, rows of the next step, outcomes, results out. Pure: no I/O.

One step: `take` every plan that came, `next_step`, compute, `finish` (or `fail`), send `ledger.after_step()`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from quire.v1 import executor_pb2
from quire.v1.types_pb2 import FinishReason
from services.common.errors import QuireError, Reason
from services.executor.admission import ModelLimits, check_blocks, check_plan, enter, group_blocks
from services.executor.backends.base import StepOutputs, TokenScores
from services.executor.batch import BlockTables, Step, StepLimits, build_step, choose_rows
from services.executor.inventory import Inventory
from services.executor.results import Ledger, Results
from services.executor.sequences import ERROR, STOP, UNSPECIFIED, Sequence

BEFORE = executor_pb2.BLOCK_OPERATION_PHASE_BEFORE


@dataclass(frozen=True, slots=True)
class Opened:
    """A new epoch, the one that it closed (0 for none), and what the older one's scheduler has not seen."""

    epoch: int
    closed_epoch: int
    unseen: list[Results]


@dataclass(frozen=True, slots=True)
class Copies:
    """Block copies of one phase, in order."""

    operation_ids: list[int]
    pairs: list[tuple[int, int]]


class StepCore:
    """Sequences, their credit and their results. Mutable; owned by the step thread."""

    def __init__(self, limits: StepLimits) -> None:
        self._limits = limits
        self._model: ModelLimits | None = None
        self._tables = BlockTables(1)
        self._before: list[executor_pb2.BlockOperation] = []
        self._after: list[executor_pb2.BlockOperation] = []
        self._refuses = False
        self.sequences: dict[int, Sequence] = {}
        self.inventory = Inventory()
        self.ledger = Ledger(0)

    @property
    def epoch(self) -> int:
        return self.ledger.epoch

    def set_model(self, model: ModelLimits | None) -> None:
        """Begins anew with a model, or without one: no sequences, no known blocks."""
        self._drop_sequences()
        self._model = model
        self._tables = BlockTables(model.block_size if model is not None else 1)
        self.inventory.clear()

    def open(self, hello: executor_pb2.RunHello) -> Opened:
        """Fences the present epoch and opens the next. KV contents and inventory stay."""
        closed = self.ledger
        unseen: list[Results] = []
        if hello.previous_epoch == closed.epoch and closed.epoch > 0:
            closed.before_rest()
            unseen = [kept for kept in closed.unacknowledged if kept.sequence_number > hello.acknowledged_results]
        self._drop_sequences()
        self._refuses = False
        self.ledger = Ledger(closed.epoch + 1)
        return Opened(self.ledger.epoch, closed.epoch, unseen)

    def take(self, plan: executor_pb2.StepPlan) -> None:
        """Applies a plan. On a malformed one raises, changes nothing and ignores all later plans of the epoch."""
        if self._refuses:
            return
        try:
            check_plan(plan, self.ledger.epoch, self.ledger.last_plan)
            self._check_references(plan)
        except QuireError:
            self._refuses = True
            raise
        self.ledger.plan_taken(plan)
        for sequence_id in plan.ended_sequence_ids:
            ended = self._remove(sequence_id)
            if ended is not None:
                self.ledger.forgotten(ended)
        for operation in plan.operations:
            (self._before if operation.phase == BEFORE else self._after).append(operation)
        for block in plan.sealed if self._model is not None else ():
            self.inventory.seal(block.block_id, block.key)
        for append in plan.append:
            self._append(append)
        for state in plan.enter:
            self._enter(state)
        drafts = plan.draft_limits or [0] * len(plan.sequence_ids)
        for sequence_id, limit, draft, steps in zip(
            plan.sequence_ids, plan.token_limits, drafts, plan.step_counts, strict=True
        ):
            sequence = self.sequences.get(sequence_id)
            if sequence is None:
                continue  # it ended here before its scheduler could know
            if draft:
                self._fail(sequence, QuireError(Reason.UNSUPPORTED, "draft_limits: speculation is not supported"))
                continue
            sequence.credit.add(limit, steps)

    def copies_before(self) -> Copies:
        """Block copies due before the next step; the caller makes them, then calls `copied`."""
        return _copies(self._before)

    def copies_after(self) -> Copies:
        """Block copies due once the next step is computed, or at once where none follows."""
        return _copies(self._after)

    def copied(self, copies: Copies) -> None:
        self.inventory.overwrite(destination for _, destination in copies.pairs)
        self.ledger.operations_done(copies.operation_ids)
        done = set(copies.operation_ids)
        self._before = [operation for operation in self._before if operation.operation_id not in done]
        self._after = [operation for operation in self._after if operation.operation_id not in done]

    def next_step(self) -> Step | None:
        """The next step's rows and inputs, or None where no sequence can compute."""
        rows, crowded = choose_rows(self.sequences.values(), self._tables, self._limits)
        if not rows:
            return None
        if crowded:  # the others go first next time, or steady decodes could keep a large chunk out for ever
            for row in rows:
                self.sequences[row.sequence.sequence_id] = self.sequences.pop(row.sequence.sequence_id)
        step = build_step(rows, self._tables)
        self.inventory.overwrite(step.written_blocks)
        return step

    def finish(self, step: Step, outputs: StepOutputs) -> None:
        """Takes a computed step in: lengths, credit, tokens, ends."""
        for row in step.rows:
            sequence = row.sequence
            sequence.computed += row.count
            sequence.credit.use()
            sequence.unreported.steps += 1
        for (sequence, start), scores in zip(step.scoring, outputs.prompt_scores, strict=True):
            self._take_prompt_scores(sequence, start, scores)
        reasons: dict[int, FinishReason.ValueType] = {}
        for sequence, sampled in zip(step.sampling, outputs.sampled, strict=True):
            if sampled is None:
                if sequence.sequence_id in self.sequences:
                    self._fail(sequence, QuireError(Reason.NOT_FINITE, "the model's logits are not finite"))
            elif sequence.sequence_id in self.sequences:
                reason = sequence.append(sampled)
                if reason != UNSPECIFIED:
                    reasons[sequence.sequence_id] = reason
        for row in step.rows:
            sequence = row.sequence
            ended = reasons.get(sequence.sequence_id)
            if ended is not None:
                self._remove(sequence.sequence_id)
                self.ledger.ended(sequence, ended, sequence.tokens[-1] if ended == STOP else None, None)
            elif sequence.sequence_id in self.sequences:
                self.ledger.computed(sequence)

    def fail(self, step: Step, error: QuireError) -> None:
        """Ends the sequences of a step that could not be computed."""
        for row in step.rows:
            self._fail(row.sequence, error)

    def abandon(self) -> None:
        """Drops every sequence and ignores the epoch's further plans, after a fault that ended its stream."""
        self._drop_sequences()
        self._refuses = True

    def _check_references(self, plan: executor_pb2.StepPlan) -> None:
        entering = [state.sequence_id for state in plan.enter]
        staying = self.sequences.keys() - set(plan.ended_sequence_ids)
        if len(set(entering)) < len(entering) or not staying.isdisjoint(entering):
            raise QuireError(Reason.PROTOCOL, "enter: a sequence id is in use")
        block_count = self._model.block_count if self._model is not None else 0
        try:
            for operation in plan.operations:
                check_blocks("operations", [operation.source_block_id, operation.destination_block_id], block_count)
            if self._model is not None:
                check_blocks("sealed", [block.block_id for block in plan.sealed], block_count)
        except QuireError as error:
            raise QuireError(Reason.PROTOCOL, error.message) from None

    def _append(self, append: executor_pb2.BlockAppend) -> None:
        sequence = self.sequences.get(append.sequence_id)
        if sequence is None or self._model is None:
            return
        try:
            self._tables.append(
                sequence.table, group_blocks("append.blocks", list(append.blocks), self._model.block_count)
            )
            sequence.waits_aloud = False
        except QuireError as error:
            self._fail(sequence, error)

    def _enter(self, state: executor_pb2.SequenceState) -> None:
        try:
            if self._model is None:
                raise QuireError(Reason.NO_EXECUTOR, "no model is loaded")
            sequence, block_ids = enter(state, self._model)
        except QuireError as error:
            self.ledger.refused(state.sequence_id, error)
            return
        sequence.table = self._tables.add(block_ids)
        self.sequences[state.sequence_id] = sequence

    def _take_prompt_scores(self, sequence: Sequence, start: int, scores: TokenScores) -> None:
        if not all(map(math.isfinite, scores.chosen)):
            self._fail(sequence, QuireError(Reason.NOT_FINITE, "the model's logits are not finite"))
            return
        if not sequence.unreported.prompt_scores:
            sequence.unreported.prompt_start = start
        sequence.unreported.prompt_scores.append(scores)

    def _fail(self, sequence: Sequence, error: QuireError) -> None:
        self._remove(sequence.sequence_id)
        self.ledger.ended(sequence, ERROR, None, error)

    def _remove(self, sequence_id: int) -> Sequence | None:
        sequence = self.sequences.pop(sequence_id, None)
        if sequence is not None:
            self._tables.release(sequence.table)
        return sequence

    def _drop_sequences(self) -> None:
        for sequence_id in list(self.sequences):
            sequence = self._remove(sequence_id)
            if sequence is not None:
                self.ledger.forgotten(sequence)
        self._before, self._after = [], []


def _copies(operations: list[executor_pb2.BlockOperation]) -> Copies:
    return Copies(
        [operation.operation_id for operation in operations],
        [(operation.source_block_id, operation.destination_block_id) for operation in operations],
    )
