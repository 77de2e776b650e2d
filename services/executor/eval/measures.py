"""What is measured of logits [R, V]: how well they predict a text, and how far they are from those of a reference.

The logits are fp32, all sums are float64, logs are natural. Equal logits win by the lowest id.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
Int32 = NDArray[np.int32]

_LEAST_NORM = 1e-30  # divides where a reference's logits are all zero
_ROWS = 2  # at once, so that what is in work stays in the caches


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


def compare(logits: Sequence[Float32], targets: Int32) -> tuple[Float64, list[Distance]]:
    """Several models on the same rows, the reference first.

    The log probabilities [M, R] of one target per row, and how far all but the first are from that.
    """
    with _one_thread():
        return _compare(logits, targets)


def _compare(logits: Sequence[Float32], targets: Int32) -> tuple[Float64, list[Distance]]:
    reference, *others = logits
    rows = len(reference)
    likelihoods = np.empty((len(logits), rows))
    kl, error = np.empty((2, len(others), rows))
    for first in range(0, rows, _ROWS):
        piece = slice(first, first + _ROWS)
        ids = torch.from_numpy(targets[piece].astype(np.int64))[:, None]
        wanted = torch.from_numpy(reference[piece]).double()
        total = wanted.logsumexp(1)
        likelihoods[0, piece] = (wanted.gather(1, ids)[:, 0] - total).numpy()
        if not others:
            continue
        probabilities = (wanted - total[:, None]).exp_()
        norm = wanted.norm(dim=1).clamp_(min=_LEAST_NORM)
        for i, own in enumerate(others):
            found = torch.from_numpy(own[piece]).double()
            own_total = found.logsumexp(1)
            likelihoods[1 + i, piece] = (found.gather(1, ids)[:, 0] - own_total).numpy()
            apart = found.sub_(wanted)
            error[i, piece] = (apart.norm(dim=1) / norm).numpy()
            divergence = own_total - total - torch.linalg.vecdot(probabilities, apart)
            kl[i, piece] = divergence.clamp_(min=0).numpy()  # of equals, rounding may leave less
    top = reference.argmax(1)
    return likelihoods, [Distance(top == own.argmax(1), kl[i], error[i]) for i, own in enumerate(others)]


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Rows are too short to share: beside other work threads would mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


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
