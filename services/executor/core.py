"""The executor's decisions between two steps: plans in, rows of the next step, outcomes, results out. Pure: no I/O.

One step: `take` every plan that came, `demote`, `choose`, draft, `build`, compute, `finish` (or `fail`), send
`ledger.after_step()`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from collections.abc import Sequence as Sequence_
from dataclasses import dataclass
from typing import Protocol

from quire.v1 import executor_pb2, types_pb2
from quire.v1.types_pb2 import FinishReason
from services.common.errors import QuireError, Reason
from services.executor.admission import GROUP, ModelLimits, check_blocks, check_plan, enter, group_blocks
from services.executor.backends.base import StepOutputs, TokenScores
from services.executor.batch import BlockTables, Row, Step, StepLimits, build_step, choose_rows
from services.executor.credit import UNBOUNDED
from services.executor.demotions import Demotions
from services.executor.embedding import Embedding
from services.executor.grammar.guide import Guide
from services.executor.inventory import Inventory
from services.executor.operations import AFTER, BEFORE, Copies, Move, Operations, check_operation
from services.executor.results import Ledger, Results
from services.executor.sequences import ERROR, STOP, UNSPECIFIED, Drafted, Sequence
from services.executor.speculation.draft_cache import DraftCache
from services.executor.tiers.pools import NO_POOLS
from services.executor.tiers.store import NO_KEY


@dataclass(frozen=True, slots=True)
class Opened:
    """A new epoch, those in which nothing runs any more by now, and what the older one's scheduler has not seen."""

    epoch: int
    closed_epochs: list[int]
    unseen: list[Results]


class Guides(Protocol):
    """What compiles rules of outputs, beside the steps."""

    def guide(self, constraint: types_pb2.Constraint, end_ids: frozenset[int], output: Sequence_[int]) -> Guide:
        """A guide for a sequence with that output so far, perhaps pending. `end_ids`: the tokens that end it."""
        ...


class StepCore:
    """Sequences, their credit and their results. Mutable; owned by the step thread."""

    def __init__(self, limits: StepLimits) -> None:
        self._limits = limits
        self._model: ModelLimits | None = None
        self.tables = BlockTables(1)
        self._draft_cache: DraftCache | None = None
        self._refuses = False
        self._guides: Guides | None = None
        self._compiling: set[int] = set()  # sequences whose grammar is
        self.sequences: dict[int, Sequence] = {}
        self.inventory = Inventory()
        self.operations = Operations()
        self.ledger = Ledger(0)

    @property
    def epoch(self) -> int:
        return self.ledger.epoch

    def set_model(
        self,
        model: ModelLimits | None,
        found: Iterable[tuple[int, bytes]] = (),
        draft_cache: DraftCache | None = None,
        guides: Guides | None = None,
    ) -> None:
        """Begins anew with a model, or without one: no sequences, no known blocks but those `found` in lower tiers."""
        self._drop_sequences()
        self._guides = guides
        self._draft_cache = draft_cache
        if draft_cache is not None:
            draft_cache.clear()
        self._model = model
        self.tables = BlockTables(model.block_size if model is not None else 1)
        self.inventory.clear()
        for block_id, key in found:
            self.inventory.seal(block_id, key)

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
        if closed.epoch:
            self.operations.close(closed.epoch)
        return Opened(self.ledger.epoch, self.operations.closed(), unseen)

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
        self.operations.take(plan.operations)
        for block in plan.sealed if self._model is not None else ():
            if block.group_id == GROUP:
                self.inventory.seal(block.block_id, block.key)
            elif self._draft_cache is not None:
                self._draft_cache.inventory.seal(block.block_id, block.key)
        for append in plan.append:
            self._append(append)
        for state in plan.enter:
            self._enter(state)
        for demotion in plan.demotions:
            self._add_demotion(demotion)
        drafts = plan.draft_limits or [0] * len(plan.sequence_ids)
        credits = plan.draft_credits or [UNBOUNDED] * len(plan.sequence_ids)
        for sequence_id, limit, draft, steps, credit in zip(
            plan.sequence_ids, plan.token_limits, drafts, plan.step_counts, credits, strict=True
        ):
            sequence = self.sequences.get(sequence_id)
            if sequence is None:
                continue  # it ended here before its scheduler could know
            sequence.credit.add(limit, steps, draft, credit)

    def copies_before(self) -> Copies:
        """Block copies due before the next step; the caller makes them, then calls `copied`."""
        return self.operations.copies(BEFORE)

    def copies_after(self) -> Copies:
        """Block copies due once the next step is computed, or at once where none follows."""
        return self.operations.copies(AFTER)

    def copied(self, copies: Copies) -> None:
        self.inventory.overwrite(destination for _, destination in copies.pairs)
        if self._draft_cache is not None:
            self._draft_cache.copied(copies.draft_pairs)
        self.ledger.operations_done(copies.operation_ids)
        self.operations.copied(copies)

    def sealed_blocks(self) -> list[executor_pb2.SealedBlock]:
        """Which blocks hold what settled content, of all cache groups."""
        drafts = self._draft_cache.inventory.to_sealed_blocks() if self._draft_cache is not None else []
        return self.inventory.to_sealed_blocks() + drafts

    def moves_before(self) -> list[Move]:
        """Moves between tiers that may begin before the next step; the caller calls `moved` for each once it ended."""
        return self._begin_moves(BEFORE)

    def moves_after(self) -> list[Move]:
        """The same once the next step is computed, or at once where none follows."""
        return self._begin_moves(AFTER)

    def moved(self, move: Move, is_done: bool) -> list[int]:
        """Takes the end of a move in. Returns epochs in which nothing runs any more by now."""
        if self.operations.ended(move) and is_done and move.destination is not None and move.key != NO_KEY:
            self.inventory.seal(move.destination, move.key)
        return self.operations.closed()

    def demote(self) -> list[tuple[int, int]]:
        """Makes the changes of block tables that are due; the caller writes these copies (source, destination) now."""
        pairs = []
        for sequence in self.sequences.values():
            if sequence.demotions is None:
                continue
            for change in sequence.demotions.due(sequence.computed):
                source = self.tables.replace(sequence.table, change.position, change.block_id)
                if change.writes:
                    pairs.append((source, change.block_id))
            if not sequence.demotions:
                sequence.demotions = None
        return pairs

    def choose(self) -> list[Row]:
        """What the next step computes: none where no sequence can. Drafts may be put into the rows that have room."""
        self._end_unguided()
        rows, crowded = choose_rows(self.sequences.values(), self.tables, self._limits)
        if crowded:  # the others go first next time, or steady decodes could keep a large chunk out for ever
            for row in rows:
                self.sequences[row.sequence.sequence_id] = self.sequences.pop(row.sequence.sequence_id)
        return rows

    def cut_drafts(self, rows: list[Row]) -> None:
        """Drops drafts that the grammars of their sequences refuse, and what follows them."""
        for row in rows:
            if row.draft_ids and row.sequence.guide is not None:
                row.draft_ids = row.draft_ids[: row.sequence.guide.cut(row.sequence.output, row.draft_ids)]

    def build(self, rows: list[Row]) -> Step:
        """The inputs of a step over these rows."""
        return build_step(rows, self.tables)

    def finish(self, step: Step, outputs: StepOutputs) -> None:
        """Takes a computed step in: lengths, credit, tokens, ends."""
        for row in step.rows:
            sequence = row.sequence
            sequence.computed += row.count
            sequence.unreported.steps += 1
            if sequence.credit.draft_limit:
                sequence.unreported.drafted.append(Drafted(len(row.draft_ids), is_behind=row.is_behind))
            sequence.credit.use()
        for (sequence, start), scores in zip(step.scoring, outputs.prompt_scores, strict=True):
            self._take_prompt_scores(sequence, start, scores)
        reasons: dict[int, FinishReason.ValueType] = {}
        sampled = iter(outputs.sampled)
        for sequence in step.sampling:
            drawn = list(itertools.islice(sampled, sequence.sample_row.count))
            if sequence.sequence_id not in self.sequences:
                continue
            reason = sequence.take(drawn)
            if reason is None:
                self._end_undrawn(sequence)
            elif reason != UNSPECIFIED:
                reasons[sequence.sequence_id] = reason
        for row in step.rows:
            sequence = row.sequence
            ended = reasons.get(sequence.sequence_id)
            if sequence.embedding is not None and not sequence.remaining:
                self._end_embedded(sequence, sequence.embedding)
            elif ended is not None:
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
        pools = self._model.pools if self._model is not None else NO_POOLS
        draft_pools = self._model.draft_pools if self._model is not None else NO_POOLS
        for operation in plan.operations:
            check_operation(operation, pools, draft_pools)
        try:
            for demotion in plan.demotions:
                check_blocks("demotions", list(demotion.block_ids), block_count)
            if self._model is not None:
                counts = (block_count, self._model.draft_count)
                for group, count in enumerate(counts):
                    check_blocks("sealed", [block.block_id for block in plan.sealed if block.group_id == group], count)
        except QuireError as error:
            raise QuireError(Reason.PROTOCOL, error.message) from None

    def _append(self, append: executor_pb2.BlockAppend) -> None:
        sequence = self.sequences.get(append.sequence_id)
        if sequence is None or self._model is None:
            return
        try:
            counts = (self._model.hot_count, self._model.draft_count)
            block_ids, draft_ids = group_blocks("append.blocks", list(append.blocks), *counts)
            self.tables.append(sequence.table, block_ids)
            self.inventory.overwrite(block_ids)
            if self._draft_cache is not None:
                self._draft_cache.append(sequence.sequence_id, draft_ids)
            sequence.waits_aloud = False
        except QuireError as error:
            self._fail(sequence, error)

    def _begin_moves(self, phase: int) -> list[Move]:
        if self._model is None:
            return []
        moves = self.operations.begin_moves(
            phase, self.epoch, self._model.pools, self._unsettled, self.inventory.key_of
        )
        self.inventory.overwrite(move.destination for move in moves if move.destination is not None)
        return moves

    def _unsettled(self) -> set[int]:
        """Blocks that present sequences are still to write."""
        ahead = (self.tables.ahead(sequence.table, sequence.computed) for sequence in self.sequences.values())
        return set(itertools.chain.from_iterable(ahead))

    def _add_demotion(self, demotion: executor_pb2.BlockDemotion) -> None:
        sequence = self.sequences.get(demotion.sequence_id)
        if sequence is None or self._model is None:
            return
        if sequence.demotions is None:
            sequence.demotions = Demotions()
        try:
            sequence.demotions.add(demotion, sequence.computed, self.tables.ids(sequence.table), self._model)
            pairs = zip(demotion.block_ids, demotion.writes, strict=True)
            self.inventory.overwrite(block_id for block_id, writes in pairs if writes)
        except QuireError as error:
            self._fail(sequence, error)

    def _enter(self, state: executor_pb2.SequenceState) -> None:
        try:
            if self._model is None:
                raise QuireError(Reason.NO_EXECUTOR, "no model is loaded")
            sequence, block_ids, draft_ids = enter(state, self._model)
            if state.HasField("constraint"):
                sequence.guide = self._guide(state.constraint, sequence)
        except QuireError as error:
            self.ledger.refused(state.sequence_id, error)
            return
        if sequence.guide is not None:
            self._compiling.add(state.sequence_id)
        sequence.table = self.tables.add(block_ids)
        self.inventory.overwrite(self.tables.ahead(sequence.table, sequence.computed))
        if self._draft_cache is not None:
            self._draft_cache.enter(state.sequence_id, draft_ids, state.computed_length)
        self.sequences[state.sequence_id] = sequence

    def _guide(self, constraint: types_pb2.Constraint, sequence: Sequence) -> Guide:
        if self._guides is None or self._model is None:
            raise QuireError(Reason.UNSUPPORTED, "constraint: is not supported here", field="constraint")
        end_ids = frozenset(token for token in sequence.ending.end_ids if token < self._model.vocab_size)
        return self._guides.guide(constraint, end_ids, sequence.output)

    def _end_unguided(self) -> None:
        """Ends the sequences whose grammar could not be compiled."""
        for sequence_id in list(self._compiling):
            sequence = self.sequences.get(sequence_id)
            if sequence is None or not sequence.awaits_grammar:
                self._compiling.discard(sequence_id)
            if sequence is not None and sequence.guide is not None and sequence.guide.error is not None:
                self._fail(sequence, sequence.guide.error)

    def _end_embedded(self, sequence: Sequence, embedding: Embedding) -> None:
        """Ends a sequence whose prompt is computed, with its vector."""
        try:
            sequence.unreported.embedding = embedding.vector()
        except QuireError as error:
            self._fail(sequence, error)
        else:
            self._remove(sequence.sequence_id)
            self.ledger.ended(sequence, STOP, None, None)

    def _end_undrawn(self, sequence: Sequence) -> None:
        """Ends a sequence that no token could be drawn for.

        A grammar that lets nothing follow ends its sequence also where no end token may be drawn.
        """
        if sequence.guide is not None and sequence.guide.has_ended(sequence.output):
            self._remove(sequence.sequence_id)
            self.ledger.ended(sequence, STOP, None, None)
            return
        error = sequence.guide.error if sequence.guide is not None else None
        self._fail(sequence, error or QuireError(Reason.NOT_FINITE, "the model's logits are not finite"))

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
            self.tables.release(sequence.table)
            if sequence.guide is not None:
                sequence.guide.abandon()
            if self._draft_cache is not None:
                self._draft_cache.leave(sequence_id)
        return sequence

    def _drop_sequences(self) -> None:
        for sequence_id in list(self.sequences):
            sequence = self._remove(sequence_id)
            if sequence is not None:
                self.ledger.forgotten(sequence)
        self.operations.drop()
