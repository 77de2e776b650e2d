"""Draws one token from one row of logits: the reference that every backend's sampler is held to.

Order: logit_bias, the ban of end tokens below min_tokens, repetition penalty (over prompt and output), presence and
frequency penalties (over output only), the mask of a grammar, temperature, top_k, top_p (of what top_k left), min_p,
then the argmax of scaled logit plus Gumbel noise. top_k and top_p keep what ties with the last one kept; otherwise the
lowest id wins.

Greedy is a temperature below 1e-5, top_k = 1 or top_p = 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from services.executor.backends.base import SampleRow, SamplingRule, TokenMasks
from services.executor.sampling import philox

Float32 = NDArray[np.float32]

GREEDY_TEMPERATURE = 1e-5


def is_greedy(rule: SamplingRule) -> bool:
    return rule.temperature < GREEDY_TEMPERATURE or rule.top_k == 1 or rule.top_p == 0.0


def takes_argmax(row: SampleRow) -> bool:
    """Whether the row's token is simply the argmax of the model's logits."""
    rule = row.rule
    return row.allowed is None and is_greedy(rule) and not (rule.logit_bias or _penalizes(rule) or _bans(row))


def draw(logits: Sequence[Float32], rows: Sequence[SampleRow]) -> list[int]:
    """A token per row (without drafts) of logits [V] whose maximum is finite; -1 where rules leave nothing finite."""
    drawn = [-1] * len(rows)
    narrow: list[tuple[int, Float32, NDArray[np.int64]]] = []
    for i, (row_logits, row) in enumerate(zip(logits, rows, strict=True)):
        changed = apply_rules(row_logits, row)
        best = int(changed.argmax())
        if not math.isfinite(changed[best]):
            continue
        if is_greedy(row.rule):
            drawn[i] = best
            continue
        # The maximum first, so that no temperature can overflow.
        with np.errstate(over="ignore"):
            scaled = (changed - changed[best]) / np.float32(row.rule.temperature)
        floor = _floor(scaled, row.rule)
        kept = np.flatnonzero(scaled >= floor) if floor > -math.inf else None
        if kept is None or len(kept) * 4 > len(scaled):
            noisy = scaled + philox.gumbel(philox.all_words(_noise_key(row), len(scaled)))
            drawn[i] = int(np.where(scaled >= floor, noisy, -np.inf).argmax())
        else:
            narrow.append((i, scaled[kept], kept))
    if narrow:
        words = philox.words([_noise_key(rows[i]) for i, _, _ in narrow], [kept for _, _, kept in narrow])
        for (i, scaled, kept), row_words in zip(narrow, words, strict=True):
            drawn[i] = int(kept[(scaled + philox.gumbel(row_words)).argmax()])
    return drawn


def single_rows(rows: Iterable[SampleRow], masks: TokenMasks | None = None) -> list[SampleRow]:
    """A row for each token to draw, with the drafts before it as output, and with its mask, which may not be filled."""
    singles = []
    for number, row in enumerate(rows):
        first_mask = -1 if masks is None else int(masks.first_rows[number])
        if not row.draft_ids and first_mask < 0:
            singles.append(row)
            continue
        for at in range(row.count):
            output_ids = [*row.output_ids, *row.draft_ids[: row.first_place + at]]
            single = SampleRow(row.row + at, row.rule, row.prompt_ids, output_ids)
            if masks is not None and first_mask >= 0:
                single.allowed = masks.bits[first_mask + at]
            singles.append(single)
    return singles


def apply_rules(logits: Float32, row: SampleRow) -> Float32:
    """The logits [V] after bias, ban, penalties and mask: a copy where anything changes."""
    rule = row.rule
    if not (rule.logit_bias or _penalizes(rule) or _bans(row) or row.allowed is not None):
        return logits
    changed = logits.copy()
    if rule.logit_bias:
        changed[list(rule.logit_bias)] += np.array(list(rule.logit_bias.values()), np.float32)
    if _bans(row):
        changed[list(rule.banned_until_min_tokens)] = -np.inf
    if _penalizes(rule):
        output, counts = np.unique(np.array(row.output_ids, dtype=np.int64), return_counts=True)
        if rule.repetition_penalty != 1.0:
            seen = np.concatenate((np.array(row.prompt_ids, dtype=np.int64), output))  # twice is harmless
            values, penalty = changed[seen], np.float32(rule.repetition_penalty)
            changed[seen] = np.where(values > 0, values / penalty, values * penalty)
        changed[output] -= (rule.frequency_penalty * counts + rule.presence_penalty).astype(np.float32)
    if row.allowed is not None:
        bits = np.unpackbits(row.allowed.view(np.uint8), count=len(changed), bitorder="little")
        changed[bits == 0] = -np.inf
    return changed


def probabilities(logits: Float32, row: SampleRow) -> NDArray[np.float64]:
    """With which probability each token [V] is drawn; all 0 where the rules leave nothing finite."""
    changed = apply_rules(logits, row)
    found = np.zeros(len(changed))
    best = int(changed.argmax())
    if not math.isfinite(changed[best]):
        return found
    if is_greedy(row.rule):
        found[best] = 1.0
        return found
    with np.errstate(over="ignore"):
        scaled = (changed - changed[best]) / np.float32(row.rule.temperature)
    found[:] = np.where(scaled >= _floor(scaled, row.rule), np.exp(scaled, dtype=np.float64), 0.0)
    found /= found.sum()
    return found


def _penalizes(rule: SamplingRule) -> bool:
    return rule.repetition_penalty != 1.0 or rule.presence_penalty != 0.0 or rule.frequency_penalty != 0.0


def _bans(row: SampleRow) -> bool:
    return len(row.output_ids) < row.rule.min_tokens and len(row.rule.banned_until_min_tokens) > 0


def _floor(scaled: Float32, rule: SamplingRule) -> float:
    """The least scaled logit that may be drawn; scaled [V] has maximum 0."""
    floor, candidates = -math.inf, scaled
    if 0 < rule.top_k < len(scaled):
        at = len(scaled) - rule.top_k
        floor = float(np.partition(scaled, at)[at])
        candidates = scaled[scaled >= floor]
    if rule.top_p < 1.0:
        ordered = np.sort(candidates)[::-1]
        reached = np.cumsum(np.exp(ordered), dtype=np.float64)
        # Of the sum itself, so that rounding never keeps it just below top_p.
        floor = float(ordered[np.searchsorted(reached, rule.top_p * reached[-1])])
    if rule.min_p > 0.0:
        floor = max(floor, math.log(rule.min_p))
    return floor


def _noise_key(row: SampleRow) -> philox.NoiseKey:
    return philox.NoiseKey(row.rule.seed, row.rule.choice, len(row.output_ids))
