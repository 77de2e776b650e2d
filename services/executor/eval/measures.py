"""What is measured of logits [R, V]: how well they predict a text, and how far they are from those of a reference.

The logits are fp32, all sums are float64, logs are natural. Equal logits win by the lowest id.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
Int32 = NDArray[np.int32]

_LEAST_NORM = 1e-30  # divides where a reference's logits are all zero


@dataclass(frozen=True, slots=True)
class Fit:
    """How well a model predicts a text."""

    scored: int  # tokens
    nll: float  # mean negative log likelihood, nats per token
    nll_error: float  # standard error of `nll`, tokens taken as independent
    perplexity: float  # exp(nll)
    bits_per_byte: float | None  # None where the scored tokens stand for no bytes


@dataclass(frozen=True, slots=True)
class Distance:
    """One row of each logits against the reference's; arrays [R]."""

    same_top: NDArray[np.bool_]  # whether the likeliest token is the same
    kl: Float64  # KL(reference || candidate) of the next token, nats
    logit_error: Float64  # |candidate - reference| / |reference|, L2 norms of raw logits


@dataclass(frozen=True, slots=True)
class Agreement:
    positions: int
    top1_agreement: float  # share of positions
    kl_mean: float
    kl_p99: float
    logit_error_median: float
    logit_error_max: float


def log_likelihoods(logits: Float32, targets: Int32) -> Float64:
    """Log probabilities [R] of one target per row."""
    return np.array([_logprobs(row)[target] for row, target in zip(logits, targets, strict=True)])


def distance(reference: Float32, candidate: Float32) -> Distance:
    """How far the candidate's logits are from the reference's, row by row."""
    rows = [_row_distance(*pair) for pair in zip(reference, candidate, strict=True)]
    kl, error = np.array(rows).reshape(-1, 2).T
    return Distance(reference.argmax(1) == candidate.argmax(1), kl, error)


def summarize_fit(log_likelihoods: Float64, byte_count: int) -> Fit:
    """Of the log likelihoods [N] of all scored tokens, N at least 1, which stand for `byte_count` bytes of text."""
    nll, count = -float(log_likelihoods.mean()), len(log_likelihoods)
    spread = float(log_likelihoods.std(ddof=1)) if count > 1 else 0.0
    return Fit(
        scored=count,
        nll=nll,
        nll_error=spread / math.sqrt(count),
        perplexity=math.exp(nll),
        bits_per_byte=nll * count / math.log(2) / byte_count if byte_count else None,
    )


def summarize_agreement(parts: Sequence[Distance]) -> Agreement:
    """Of all positions, at least one."""
    same = np.concatenate([part.same_top for part in parts])
    kl = np.concatenate([part.kl for part in parts])
    error = np.concatenate([part.logit_error for part in parts])
    return Agreement(
        positions=len(same),
        top1_agreement=float(same.mean()),
        kl_mean=float(kl.mean()),
        kl_p99=float(np.percentile(kl, 99)),
        logit_error_median=float(np.median(error)),
        logit_error_max=float(error.max()),
    )


def _row_distance(reference: Float32, candidate: Float32) -> tuple[float, float]:
    """KL and relative error of one row [V]; row by row, so that what is in work stays in the caches."""
    wanted, found = reference.astype(np.float64), candidate.astype(np.float64)
    error = np.linalg.norm(found - wanted) / max(float(np.linalg.norm(wanted)), _LEAST_NORM)
    wanted, found = _logprobs(wanted), _logprobs(found)
    kl = float(np.exp(wanted) @ (wanted - found))
    return max(kl, 0.0), float(error)  # rounding may leave a KL of equals just below 0


def _logprobs(logits: Float32 | Float64) -> Float64:
    """Of one row [V]."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max()
    shifted -= np.log(np.exp(shifted).sum())
    return shifted
