"""The modified rejection rule: drafts sampled from a distribution of their own become samples of the target's.

Leviathan et al. 2023; Chen et al. 2023. It accepts a draft with probability 1 - TV(target, draft), the most that any
rule can. Drafts of this executor are drawn with the noise of their output position instead, and accepted where the
target draws the same: that keeps output a function of the seed, at an acceptance of at least (1 - TV) / (1 + TV)
(Daliri et al. 2025). This rule is what that one is measured against.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]


class Verified(NamedTuple):
    """Of each of R runs: its tokens, of which the first `counts` are output, the last of these not drafted."""

    token_ids: Int64  # [R, k + 1]
    counts: Int64  # [R], 1 to k + 1


def verify(target: Float64, draft: Float64, draft_ids: Int64, uniforms: Float64) -> Verified:
    """Checks k drafts of each run.

    `target` [R, k + 1, V] holds the probabilities at each place as if the drafts before it were output, all rules
    applied; `draft` [R, k, V] those that draft_ids [R, k] were drawn from; `uniforms` [R, k + 1, 2] independent numbers
    of [0, 1).
    """
    runs, places, vocab = target.shape
    each = np.arange(runs)
    at = (each[:, None], np.arange(places - 1), draft_ids)
    is_accepted = uniforms[:, :-1, 0] * draft[at] < target[at]
    accepted = np.cumprod(is_accepted, axis=1, dtype=np.int64).sum(axis=1)
    # After the last draft nothing was drafted: what is left of the target is all of it.
    drafted = np.concatenate((draft, np.zeros((runs, 1, vocab))), axis=1)[each, accepted]
    wanted = target[each, accepted]
    left = np.maximum(wanted - drafted, 0.0)
    left = np.where(left.sum(axis=1, keepdims=True) > 0, left, wanted)  # where the two are equal but for rounding
    token_ids = np.concatenate((draft_ids, np.zeros((runs, 1), np.int64)), axis=1)
    token_ids[each, accepted] = _draw(left, uniforms[each, accepted, 1])
    return Verified(token_ids, accepted + 1)


def _draw(weights: Float64, uniforms: Float64) -> Int64:
    """A token per row of weights [R, V], by inversion."""
    sums = np.cumsum(weights, axis=1)
    chosen: Int64 = (sums <= (uniforms * sums[:, -1])[:, None]).sum(axis=1)
    return chosen
