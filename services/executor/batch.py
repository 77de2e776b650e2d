"""Which sequences a step computes, and its inputs."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from services.executor.backends.base import Int32, PromptScoreRows, StepInputs
from services.executor.sequences import Sequence

log = logging.getLogger("quire.executor")


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The most that one step computes."""

    sequences: int
    tokens: int


@dataclass(slots=True)
class Row:
    """A sequence's part of a step."""

    sequence: Sequence
    count: int  # known tokens
    draft_room: int = 0  # drafts that may follow them
    draft_ids: list[int] = field(default_factory=list)
    is_behind: bool = False  # what proposes has not taken in its text yet


@dataclass(slots=True)
class Step:
    """A step about to be computed. sampling and scoring are parallel to the inputs' samples and prompt_scores."""

    inputs: StepInputs
    rows: list[Row]
    sampling: list[Sequence]
    scoring: list[tuple[Sequence, int]]  # with the index of the first prompt token scored


class BlockTables:
    """Block tables of all sequences as rows of one matrix, so that a step gathers them in one go."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._ids: Int32 = np.zeros((16, 16), np.int32)
        self._lengths: list[int] = [0] * 16
        self._unused = list(range(15, -1, -1))

    def add(self, block_ids: list[int]) -> int:
        """A new row holding these blocks."""
        if not self._unused:
            rows = len(self._lengths)
            self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
            self._lengths += [0] * rows
            self._unused = list(range(2 * rows - 1, rows - 1, -1))
        table = self._unused.pop()
        self._lengths[table] = 0
        self._ids[table] = 0
        self.append(table, block_ids)
        return table

    def append(self, table: int, block_ids: list[int]) -> None:
        start = self._lengths[table]
        end = start + len(block_ids)
        width = self._ids.shape[1]
        if end > width:
            wider = max(end, 2 * width)
            self._ids = np.pad(self._ids, ((0, 0), (0, wider - width)))
        self._ids[table, start:end] = block_ids
        self._lengths[table] = end

    def release(self, table: int) -> None:
        self._unused.append(table)

    def ids(self, table: int) -> list[int]:
        """All blocks of a row."""
        found: list[int] = self._ids[table, : self._lengths[table]].tolist()
        return found

    def replace(self, table: int, position: int, block_id: int) -> int:
        """Names another block at a position; returns the one before."""
        before = int(self._ids[table, position])
        self._ids[table, position] = block_id
        return before

    def ahead(self, table: int, computed: int) -> list[int]:
        """Blocks of the row's tokens from `computed` on."""
        found: list[int] = self._ids[table, computed // self.block_size : self._lengths[table]].tolist()
        return found

    def slots(self, table: int) -> int:
        """Tokens that the row's blocks hold."""
        return self._lengths[table] * self.block_size

    def gather(self, tables: list[int]) -> Int32:
        """Rows [len(tables), most blocks of any]; unused entries are 0."""
        width = max(self._lengths[table] for table in tables)
        return self._ids[tables, :width]


def choose_rows(sequences: Iterable[Sequence], tables: BlockTables, limits: StepLimits) -> tuple[list[Row], bool]:
    """Every sequence with credit, in the given order, up to the limits; and whether these left any out.

    A sequence whose blocks cannot hold its next tokens waits, and before its first token so does one whose grammar is
    being compiled. None computes past a change of its block table. Drafts
    have what room is left.
    """
    rows: list[Row] = []
    crowded = False
    left = limits.tokens
    for sequence in sequences:
        if sequence.credit.steps == 0:
            continue
        count = min(sequence.credit.token_limit, sequence.remaining, limits.tokens)
        if sequence.demotions is not None:
            count = min(count, sequence.demotions.room(sequence.computed))
        if sequence.awaits_grammar and count == sequence.remaining:
            continue
        if sequence.computed + count > tables.slots(sequence.table):
            if not sequence.waits_aloud:
                sequence.waits_aloud = True
                log.warning("a granted sequence waits for blocks", extra={"sequence": sequence.sequence_id})
            continue
        if count > left or len(rows) == limits.sequences:
            crowded = True
            continue
        rows.append(Row(sequence, count))
        left -= count
    for row in rows:
        if row.sequence.credit.draft_limit and row.count == row.sequence.remaining:
            row.draft_room = min(left, _draft_room(row, tables))
            left -= row.draft_room
    return rows, crowded


def _draft_room(row: Row, tables: BlockTables) -> int:
    """Drafts that may follow all known tokens: within the grant, the output's budget, the blocks and their formats."""
    sequence = row.sequence
    end = sequence.computed + row.count
    credit = sequence.credit
    room = min(credit.draft_limit, credit.drafts, sequence.most_drafts, tables.slots(sequence.table) - end)
    if sequence.demotions is not None:
        room = min(room, sequence.demotions.room(sequence.computed) - row.count)
    return room


def room_ahead(rows: list[Row], tables: BlockTables) -> Int32 | None:
    """Tokens that the blocks of each sequence hold [rows]; None unless all rows draw and may go on with what they draw.

    For a step that `build_step` made of the same rows and that was not taken in yet.
    """
    slots = []
    for row in rows:
        sequence = row.sequence
        credit, end = sequence.credit, sequence.computed + row.count
        if (
            end != len(sequence.tokens)
            or credit.steps < 2
            or credit.draft_limit
            or sequence.guide is not None
            or len(sequence.output) + 1 >= sequence.ending.max_output
            or (sequence.demotions is not None and sequence.demotions.room(sequence.computed) <= row.count)
        ):
            return None
        slots.append(tables.slots(sequence.table))
    return np.array(slots, np.int32)


def build_step(rows: list[Row], tables: BlockTables) -> Step:
    """The inputs of a step over `rows`, at least one."""
    token_ids: list[int] = []
    samples, sampling, scoring, scores, counts, pooled = [], [], [], [], [], []
    for row in rows:
        sequence, start = row.sequence, row.sequence.computed
        first, end = len(token_ids), start + row.count
        if row.count == 1:
            token_ids.append(sequence.tokens[start])
        else:
            token_ids += sequence.tokens[start:end]
        token_ids += row.draft_ids
        counts.append(row.count + len(row.draft_ids))
        if sequence.embedding is not None:
            if (part := sequence.embedding.rows(first, start, row.count)) is not None:
                pooled.append(part)
        elif end == len(sequence.tokens):
            sequence.sample_row.row = first + row.count - 1
            sequence.sample_row.draft_ids, sequence.sample_row.first_place = row.draft_ids, 0
            samples.append(sequence.sample_row)
            sampling.append(sequence)
        if sequence.rule.prompt_logprob_count >= 0 and start + 1 < sequence.prompt_length:
            targets = sequence.tokens[start + 1 : min(end + 1, sequence.prompt_length)]
            scores.append(PromptScoreRows(first, targets, sequence.rule.prompt_logprob_count))
            scoring.append((sequence, start + 1))
    starts = np.array([row.sequence.computed for row in rows], np.int32)
    query_starts = np.zeros(len(rows) + 1, np.int32)
    np.cumsum(counts, out=query_starts[1:])
    inputs = StepInputs(
        token_ids=np.array(token_ids, np.int32),
        positions=np.arange(len(token_ids), dtype=np.int32) + np.repeat(starts - query_starts[:-1], counts),
        query_starts=query_starts,
        context_lengths=starts + np.array(counts, np.int32),
        block_tables=tables.gather([row.sequence.table for row in rows]),
        samples=samples,
        prompt_scores=scores,
        room=lambda: room_ahead(rows, tables),
        pooled=pooled,
    )
    return Step(inputs, rows, sampling, scoring)
