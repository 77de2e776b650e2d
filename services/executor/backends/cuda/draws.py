"""The tokens that a step draws, a row each, as arrays that the sampling kernels read. On the host, without torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.executor.backends.base import Int32, SampleRow, SamplingRule, TokenMasks

RULE = np.dtype(
    [("temperature", np.float32), ("top_k", np.int32), ("top_p", np.float64), ("min_p_floor", np.float32),
     ("repetition", np.float32), ("presence", np.float64), ("frequency", np.float64), ("seeds", np.int64),
     ("choices", np.int32)]
)  # fmt: skip
"""Fields of kernels.token_sampler.SamplingState that stay the same for a sequence."""

_MOST = (1 << 31) - 1
_ALL = np.uint32(0xFFFFFFFF)


@dataclass(slots=True, eq=False)
class Prepared:
    """What a sequence's rule is to the kernels; kept with the sequence."""

    rule: tuple[Any, ...]  # RULE's fields
    penalizes: bool
    kept: dict[object, object] = field(default_factory=dict)  # by who keeps it: a draft model's backend is another


@dataclass(frozen=True, slots=True)
class Draws:
    """R tokens to draw, for samples in their order, one after the other for each."""

    samples: Sequence[SampleRow]
    counts: Sequence[int]  # tokens of each sample
    rows: NDArray[np.int64]  # [R] of the flattened batch
    rules: NDArray[np.void]  # [R] RULE
    positions: Int32  # [R] in the output
    changes: tuple[Int32, NDArray[np.float32]] | None  # [R, C] ids (-1: none) and what is added to their logits
    drafts: Int32 | None  # [R, D] what counts as output before each; where a rule penalizes
    penalized: NDArray[np.bool_]  # [samples]
    masks: TokenMasks | None
    allowed: bool  # whether a sample has its own mask

    @property
    def is_plain(self) -> bool:
        """Whether rules and noise alone decide."""
        return self.changes is None and not self.penalized.any() and self.masks is None and not self.allowed


def prepared(sample: SampleRow) -> Prepared:
    """Made at first sight, then kept."""
    if not isinstance(sample.prepared, Prepared):
        sample.prepared = _prepare(sample.rule)
    return sample.prepared


def plan_draws(samples: Sequence[SampleRow], masks: TokenMasks | None) -> Draws:
    """All tokens that a step draws."""
    counts = np.array([sample.count for sample in samples], np.int64)
    kept = [prepared(sample) for sample in samples]
    inside = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)  # each sample's 0, 1, 2, ...
    first = [sample.row for sample in samples]
    outputs = [len(sample.output_ids) + sample.first_place for sample in samples]
    penalized = np.array([one.penalizes for one in kept], np.bool_)
    return Draws(
        samples=samples,
        counts=counts.tolist(),
        rows=np.repeat(np.array(first, np.int64), counts) + inside,
        rules=np.repeat(np.array([one.rule for one in kept], RULE), counts),
        positions=(np.repeat(np.array(outputs, np.int64), counts) + inside).astype(np.int32),
        changes=_changes(samples),
        drafts=_drafts(samples, counts.tolist()) if penalized.any() else None,
        penalized=penalized,
        masks=masks if masks is not None and bool((masks.first_rows >= 0).any()) else None,
        allowed=any(sample.allowed is not None for sample in samples),
    )


def mask_bits(draws: Draws, vocabulary: int) -> Int32:
    """[R, ceil(V / 32)] bits of the tokens allowed; the step's masks must be filled."""
    bits = np.full((len(draws.rows), -(-vocabulary // 32)), _ALL)
    row = 0
    for number, (sample, count) in enumerate(zip(draws.samples, draws.counts, strict=True)):
        first = -1 if draws.masks is None else int(draws.masks.first_rows[number])
        if first >= 0 and draws.masks is not None:
            bits[row : row + count] = draws.masks.bits[first : first + count]
        elif sample.allowed is not None:
            bits[row : row + count] = sample.allowed
        row += count
    return bits.view(np.int32)


def same_changes_next(samples: Sequence[SampleRow]) -> bool:
    """Whether the changes of logits are the same for the tokens after those that are drawn now."""
    return all(
        not sample.rule.banned_until_min_tokens
        or (len(sample.output_ids) < sample.rule.min_tokens) == (len(sample.output_ids) + 1 < sample.rule.min_tokens)
        for sample in samples
    )


def _prepare(rule: SamplingRule) -> Prepared:
    seed = rule.seed & 0xFFFFFFFFFFFFFFFF
    return Prepared(
        rule=(
            rule.temperature,
            min(rule.top_k, _MOST),
            rule.top_p,
            math.log(rule.min_p) if rule.min_p > 0 else -math.inf,
            rule.repetition_penalty,
            rule.presence_penalty,
            rule.frequency_penalty,
            seed - (1 << 64) if seed >> 63 else seed,
            rule.choice,
        ),
        penalizes=rule.repetition_penalty != 1.0 or rule.presence_penalty != 0.0 or rule.frequency_penalty != 0.0,
    )


def _changes(samples: Sequence[SampleRow]) -> tuple[Int32, NDArray[np.float32]] | None:
    rows: list[dict[int, float]] = []
    for sample in samples:
        rule = sample.rule
        if not rule.logit_bias and not rule.banned_until_min_tokens:
            rows += [{}] * sample.count
            continue
        for place in range(sample.first_place, sample.first_place + sample.count):
            found = dict(rule.logit_bias)
            if len(sample.output_ids) + place < rule.min_tokens:
                found |= dict.fromkeys(rule.banned_until_min_tokens, -math.inf)
            rows.append(found)
    most = max(map(len, rows), default=0)
    if not most:
        return None
    ids = np.full((len(rows), most), -1, np.int32)
    values = np.zeros((len(rows), most), np.float32)
    for row, found in enumerate(rows):
        ids[row, : len(found)] = list(found)
        values[row, : len(found)] = list(found.values())
    return ids, values


def _drafts(samples: Sequence[SampleRow], counts: Sequence[int]) -> Int32 | None:
    most = max((sample.first_place + count - 1 for sample, count in zip(samples, counts, strict=True)), default=0)
    if not most:
        return None
    found = np.full((sum(counts), most), -1, np.int32)
    row = 0
    for sample, count in zip(samples, counts, strict=True):
        for place in range(sample.first_place, sample.first_place + count):
            found[row, :place] = sample.draft_ids[:place]
            row += 1
    return found
