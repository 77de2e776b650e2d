"""Draws and scores on the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kernels.token_sampler import SamplingState, draw_tokens, score_tokens
from services.executor.backends.cuda.device import Device
from services.executor.backends.cuda.draws import RULE, Draws, mask_bits
from services.executor.backends.cuda.memory_layout import Field, send
from services.executor.backends.cuda.results import HostScores
from services.executor.backends.cuda.token_counts import TokenCounts

POSITIONS = "draws"
"""Name of the array of output positions beside those of RULE."""


@dataclass(frozen=True, slots=True)
class Extras:
    """What decides beside rules and noise, and which rows are scored; on the device."""

    slots: Tensor | None = None  # [R] int32 of the table of counts
    drafts: Tensor | None = None
    change_ids: Tensor | None = None
    change_values: Tensor | None = None
    masks: Tensor | None = None
    scored: Tensor | None = None  # [n] int64 rows
    alternatives: int = 0

    @property
    def is_plain(self) -> bool:
        return self.slots is None and self.change_ids is None and self.masks is None


class Sampler:
    """Not thread-safe."""

    def __init__(self, vocabulary: int, device: Device) -> None:
        self._vocabulary, self._device = vocabulary, device
        self.counts = TokenCounts(vocabulary, device)

    def extras(self, draws: Draws) -> Extras:
        """Waits for the step's masks."""
        arrays: dict[str, NDArray[Any]] = {}
        if draws.penalized.any():
            slots = self.counts.slots(draws.samples, draws.penalized.tolist())
            arrays["slots"] = np.repeat(slots, draws.counts)
            if draws.drafts is not None:
                arrays["drafts"] = draws.drafts
        if draws.changes is not None:
            arrays["change_ids"], arrays["change_values"] = draws.changes
        if draws.masks is not None or draws.allowed:
            if draws.masks is not None:
                draws.masks.wait()
            arrays["masks"] = mask_bits(draws, self._vocabulary)
        wanted = [sample.rule.logprob_count for sample in draws.samples]
        if (most := max(wanted, default=-1)) >= 0:
            arrays["scored"] = np.flatnonzero(np.repeat(np.array(wanted) >= 0, draws.counts))
        return Extras(**send(self._device, arrays), alternatives=max(most, 0)) if arrays else Extras()

    def draw(self, logits: Tensor, state: SamplingState, extras: Extras) -> Tensor:
        """Tokens [R] int32 of logits [R, V]; -1 where none can be drawn."""
        if extras.is_plain:
            return draw_tokens(logits, state)
        return draw_tokens(
            logits,
            replace(
                state,
                slots=extras.slots,
                counts=self.counts.table if extras.slots is not None else None,
                drafts=extras.drafts,
                change_ids=extras.change_ids,
                change_values=extras.change_values,
                masks=extras.masks,
            ),
        )

    def score(self, logits: Tensor, drawn: Tensor, extras: Extras) -> HostScores | None:
        """Of the rows that want it."""
        if extras.scored is None:
            return None
        rows = extras.scored
        scores = score_tokens(logits.index_select(0, rows), drawn.index_select(0, rows), extras.alternatives)
        return HostScores.fetch(self._device, scores)


def rule_fields(rows: int) -> dict[str, Field]:
    """The arrays of `rows` draws."""
    found = {name: Field((rows,), RULE[name]) for name in RULE.names or ()}
    return found | {POSITIONS: Field((rows,), np.dtype(np.int32))}


def rule_arrays(draws: Draws) -> dict[str, NDArray[Any]]:
    """The same, filled."""
    return {name: draws.rules[name] for name in RULE.names or ()} | {POSITIONS: draws.positions}


def sampling_state(arrays: Mapping[str, Tensor], rows: int) -> SamplingState:
    """The first `rows` of the arrays on the device."""
    fields = {name: arrays[name][:rows] for name in RULE.names or ()}
    return SamplingState(**fields, positions=arrays[POSITIONS][:rows])
