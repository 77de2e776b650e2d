"""Runs windows of text through a backend and hands out raw logits, a few rows at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.common.errors import QuireError, Reason
from services.executor.backends.base import SampleRow, StepInputs
from services.executor.eval.ages import AgedTable, pieces_between_changes
from services.executor.eval.text import Passage
from services.executor.eval.windows import Frame, Window, windows
from services.executor.loader import LoadedModel

SCORED_ROWS = 64
"""Scored tokens per step, so that few logits exist at a time."""

STEP_TOKENS = 512
"""Most tokens per step where none is scored."""


@dataclass(frozen=True, slots=True)
class Scored:
    """Rows of logits of some models that all predict the same tokens of a text."""

    window: int  # the number of their window
    targets: NDArray[np.int32]  # [R] tokens
    byte_count: int  # of these tokens in the text
    logits: tuple[NDArray[np.float32], ...]  # [R, V] of each model


def score_text(models: Sequence[LoadedModel], passages: Sequence[Passage], frame: Frame) -> Iterator[Scored]:
    """Every scored token of some passages once, in order, at most SCORED_ROWS at a time. Raises NOT_FINITE."""
    number = 0
    for passage in passages:
        for window in windows(len(passage.ids), frame.context, frame.stride, len(passage.prefix)):
            at = window.first
            for logits in zip(*(scored_logits(model, passage, window) for model in models), strict=True):
                targets = slice(at, at + len(logits[0]))
                yield Scored(number, passage.ids[targets], int(passage.byte_counts[targets].sum()), logits)
                at = targets.stop
            number += 1


def scored_logits(model: LoadedModel, passage: Passage, window: Window) -> Iterator[NDArray[np.float32]]:
    """Logits [at most SCORED_ROWS, V] that predict the scored tokens of a window, in order. Raises NOT_FINITE."""
    tokens = [*passage.prefix, *passage.ids[window.start : window.stop].tolist()]
    last = len(tokens) - 1  # predicts nothing, so it is not computed
    first = last - window.scored  # the logits after this token predict the first scored one
    table = AgedTable(model, last)

    def inputs(piece: range) -> StepInputs:
        table.reach(piece.start)
        return _inputs(model, [tokens[piece.start : piece.stop]], piece.start, [table.block_ids])

    for piece in pieces_between_changes(model, 0, first, STEP_TOKENS):
        model.backend.step(inputs(piece))
    for piece in pieces_between_changes(model, first, last, SCORED_ROWS):
        logits = model.backend.logits(inputs(piece), range(len(piece)))
        if not np.isfinite(logits).all():
            raise not_finite(model)
        yield logits


def inputs_for(
    model: LoadedModel, tokens: Sequence[Sequence[int]], position: int, samples: Sequence[SampleRow] = ()
) -> StepInputs:
    """A step over equally many tokens of each sequence, the first at `position`. They share the hot pool evenly."""
    needed = -(-(position + len(tokens[0])) // model.shape.block_size)
    own = model.shape.block_count // len(tokens)
    return _inputs(model, tokens, position, [range(i * own, i * own + needed) for i in range(len(tokens))], samples)


def _inputs(
    model: LoadedModel,
    tokens: Sequence[Sequence[int]],
    position: int,
    tables: Sequence[Sequence[int]],
    samples: Sequence[SampleRow] = (),
) -> StepInputs:
    sequences, count = len(tokens), len(tokens[0])
    end = position + count
    return StepInputs(
        token_ids=np.array(tokens, np.int32).reshape(-1),
        positions=np.tile(np.arange(position, end, dtype=np.int32), sequences),
        query_starts=np.arange(0, sequences * count + 1, count, dtype=np.int32),
        context_lengths=np.full(sequences, end, np.int32),
        block_tables=np.array(tables, np.int32),
        samples=list(samples),
    )


def not_finite(model: LoadedModel) -> QuireError:
    return QuireError(Reason.NOT_FINITE, f"{model.name}: the model's logits are not finite")
