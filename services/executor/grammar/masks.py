"""Which tokens each guided sequence of a step may draw, worked out while the model computes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Sequence_
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import numpy as np
from llguidance import LLExecutor

from services.common.errors import QuireError, Reason
from services.executor.backends.base import Int32, UInt32
from services.executor.grammar.guide import Guide
from services.executor.sequences import Sequence

log = logging.getLogger("quire.executor")


@dataclass(frozen=True, slots=True)
class GuidedRow:
    """A guided sequence of a step."""

    guide: Guide
    output: Sequence_[int]
    draft_ids: Sequence_[int]
    first_row: int  # of the masks: one for each place, the next token's first


class StepMasks:
    """Masks of one step, filled by another thread. As backends see them: TokenMasks."""

    def __init__(self, bits: UInt32, first_rows: Int32, filled: Future[None]) -> None:
        self.bits, self.first_rows, self._filled = bits, first_rows, filled

    def wait(self) -> None:
        self._filled.result()

    def when_filled(self, told: Callable[[], None]) -> None:
        self._filled.add_done_callback(lambda _: told())


class MaskMaker:
    """Owns the memory of the masks and the thread that fills them. `begin` is called by the step thread."""

    def __init__(self, vocab_size: int, threads: int) -> None:
        """`threads`: how many fill the masks of one step; they compete with a backend that computes on the CPUs."""
        self.end_ids: frozenset[int] = frozenset()  # of the vocabulary; known once a guide is not pending
        self._words = (vocab_size + 31) // 32
        self._bits: UInt32 = np.zeros((64, self._words), np.uint32)
        self._executor = LLExecutor(num_threads=threads)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="masks")
        self._last: Future[None] | None = None

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def begin(self, sampling: Sequence_[Sequence]) -> StepMasks | None:
        """Begins to fill the masks of a step that draws for these sequences; None where none of them is guided.

        The masks are valid until the next call.
        """
        if all(sequence.guide is None for sequence in sampling):
            return None
        first_rows = np.full(len(sampling), -1, np.int32)
        rows, count = [], 0
        for at, sequence in enumerate(sampling):
            if sequence.guide is not None:
                drafts = sequence.sample_row.draft_ids
                rows.append(GuidedRow(sequence.guide, sequence.output, drafts, count))
                first_rows[at] = count
                count += 1 + len(drafts)
        if self._last is not None:
            wait([self._last])  # of a step that failed before its masks were filled
        if count > len(self._bits):
            self._bits = np.zeros((2 * count, self._words), np.uint32)
        bits = self._bits[:count]
        self._last = self._thread.submit(self._fill, rows, bits)
        return StepMasks(bits, first_rows, self._last)

    def _fill(self, rows: list[GuidedRow], bits: UInt32) -> None:
        try:
            self._compute(rows, bits)
        except BaseException as error:  # a panic of the library is no Exception; others of the step go on
            log.exception("masks could not be computed", extra={"sequences": len(rows)})
            for row in rows:
                row.guide.fail(QuireError(Reason.INTERNAL, f"constraint: {type(error).__name__} while computing masks"))
        for row in rows:
            if row.guide.error is None:
                row.guide.check()
            own = bits[row.first_row : row.first_row + 1 + len(row.draft_ids)]
            if row.guide.error is not None:
                own[:] = 0
            elif row.guide.end_ids != self.end_ids:
                self._exchange_ends(own, row.guide.end_ids)

    def _compute(self, rows: list[GuidedRow], bits: UInt32) -> None:
        drafted, plain = [], []
        for row in rows:
            row.guide.follow(row.output)
            if row.guide.error is None and row.draft_ids:
                drafted.append((row.guide.matcher, row.first_row, list(row.draft_ids)))
            elif row.guide.error is None:
                plain.append((row.guide.matcher, row.first_row))
        memory = (bits.ctypes.data, 4 * self._words, len(bits))
        if plain:
            self._executor.unsafe_compute_mask_ptr(plain, *memory)
        if drafted:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(drafted, *memory)

    def _exchange_ends(self, rows: UInt32, wanted: frozenset[int]) -> None:
        """Where the vocabulary's end tokens are allowed, the sequence's own are instead; elsewhere none of either."""
        mark = next(iter(self.end_ids))
        may_end = (rows[:, mark >> 5] >> np.uint32(mark & 31)) & np.uint32(1)
        for token in self.end_ids | wanted:
            word, bit = token >> 5, np.uint32(1 << (token & 31))
            if token in wanted:
                rows[:, word] = np.where(may_end, rows[:, word] | bit, rows[:, word] & ~bit)
            else:
                rows[:, word] &= ~bit
