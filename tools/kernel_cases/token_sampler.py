"""Drawing, scoring, acceptance."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernels.token_sampler import SamplingState, accept_drafts, count_tokens, draw_tokens, score_tokens

VOCABULARY = 4099


def cases() -> dict[str, Callable[[], object]]:
    whole = torch.zeros(2, dtype=torch.int32)
    table = torch.zeros(2, VOCABULARY, dtype=torch.int32)
    return {
        "draw, all rules": lambda: draw_tokens(torch.zeros(2, VOCABULARY), state(2)),
        "draw": lambda: draw_tokens(torch.zeros(2, VOCABULARY), state(0)),
        "score": lambda: score_tokens(torch.zeros(2, VOCABULARY), whole, 5),
        "accept": lambda: accept_drafts(whole, table[:, :3], torch.zeros(3, dtype=torch.int32)),
        "count": lambda: count_tokens(table, whole, table[:, :3], whole),
    }


def state(changes: int) -> SamplingState:
    fp32, fp64, whole = torch.ones(2), torch.ones(2, dtype=torch.float64), torch.ones(2, dtype=torch.int32)
    wide = torch.zeros(2, max(changes, 1), dtype=torch.int32)
    return SamplingState(
        fp32, whole, fp64, fp32, fp32, fp64, fp64, torch.ones(2, dtype=torch.int64), whole, whole,
        slots=whole if changes else None, counts=torch.zeros(2, VOCABULARY, dtype=torch.int32) if changes else None,
        drafts=wide if changes else None, change_ids=wide if changes else None,
        change_values=wide.float() if changes else None,
        masks=torch.zeros(2, -(-VOCABULARY // 32), dtype=torch.int32) if changes else None,
    )  # fmt: skip
