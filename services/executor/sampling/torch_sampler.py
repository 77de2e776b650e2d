"""Sampling for torch backends: one argmax over the batch; only rows whose rules need it are looked at alone.

The rules are in draw.py, log probabilities in scores.py. A row's result depends on that row alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from services.executor.backends.base import Sampled, SampleRow, TokenScores
from services.executor.sampling import draw, scores


def sample(logits: Tensor, rows: Sequence[SampleRow]) -> list[Sampled | None]:
    """One token per row of logits [R, V] fp32, rows without drafts.

    None where a row has NaN, +inf or nothing above -inf.
    """
    if not rows:
        return []
    best_ids, best_values = _argmax(logits)
    token_ids = np.where(np.isfinite(best_values), best_ids, -1).tolist()
    ruled = [i for i, row in enumerate(rows) if token_ids[i] >= 0 and not draw.takes_argmax(row)]
    if ruled:
        drawn = draw.draw(list(_rows(logits, ruled)), [rows[i] for i in ruled])
        for i, token_id in zip(ruled, drawn, strict=True):
            token_ids[i] = token_id
    found: list[Sampled | None] = [Sampled(token_id, None) if token_id >= 0 else None for token_id in token_ids]
    scored = [i for i, row in enumerate(rows) if row.rule.logprob_count >= 0 and token_ids[i] >= 0]
    for i, row_logits in zip(scored, _rows(logits, scored), strict=True):
        token_id = token_ids[i]
        found[i] = Sampled(token_id, scores.score([row_logits], [token_id], rows[i].rule.logprob_count))
    return found


def score_prompt(logits: Tensor, targets: Sequence[int], count: int) -> TokenScores:
    """Scores targets[i] under row i of logits [N, V], with `count` alternatives. NaN where a row is not finite."""
    return scores.score(list(_rows(logits, range(len(targets)))), targets, count)


def _argmax(logits: Tensor) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Index (the lowest among equals) and value of each row's maximum; NaN counts as the maximum."""
    if logits.device.type == "cpu":
        array = logits.detach().numpy()
        ids = array.argmax(axis=1)
        return ids, array[np.arange(len(ids)), ids]
    on_device = logits.argmax(dim=1)
    return on_device.cpu().numpy(), logits.gather(1, on_device[:, None])[:, 0].cpu().numpy()


def _rows(logits: Tensor, wanted: Sequence[int]) -> NDArray[np.float32]:
    """The wanted rows [len(wanted), V] in host memory."""
    if logits.device.type == "cpu":
        array: NDArray[np.float32] = logits.detach().numpy()
        return array[list(wanted)]
    moved: NDArray[np.float32] = logits[list(wanted)].detach().cpu().numpy()
    return moved
