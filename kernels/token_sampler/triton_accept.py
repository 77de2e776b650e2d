"""Drafts against what the target drew, and the counts of what was put out."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["draft_count"])
def accept_kernel(accepted, following, drawn, drafts, row_starts, draft_count):
    sequence = tl.program_id(0)
    first = tl.load(row_starts + sequence)
    count = tl.load(row_starts + sequence + 1) - first - 1
    held = 0
    goes_on = count > 0
    while goes_on:
        goes_on = tl.load(drawn + first + held) == tl.load(drafts + sequence * draft_count + held)
        held += goes_on.to(tl.int32)
        goes_on = goes_on & (held < count)
    tl.store(accepted + sequence, held)
    tl.store(following + sequence, tl.load(drawn + first + held, mask=count >= 0, other=-1))


@triton.jit(do_not_specialize=["width"])
def count_kernel(counts, slots, tokens, token_counts, vocabulary, width):
    sequence = tl.program_id(0)
    slot = tl.load(slots + sequence).to(tl.int64)
    if slot >= 0:
        for i in range(tl.load(token_counts + sequence)):
            token = tl.load(tokens + sequence * width + i)
            if token >= 0:
                at = counts + slot * vocabulary + token
                tl.store(at, tl.load(at) + 2)
                tl.debug_barrier()  # the same token may come again


def accept_drafts(drawn: Tensor, drafts: Tensor, row_starts: Tensor) -> tuple[Tensor, Tensor]:
    """As kernels.token_sampler.accept_drafts, which has checked the arguments."""
    accepted = torch.empty(len(drafts), dtype=torch.int32, device=drawn.device)
    following = torch.empty_like(accepted)
    if len(drafts):
        accept_kernel[(len(drafts),)](
            accepted, following, drawn, drafts.contiguous(), row_starts, drafts.shape[1], num_warps=1
        )
    return accepted, following


def count_tokens(counts: Tensor, slots: Tensor, tokens: Tensor, token_counts: Tensor) -> None:
    """As kernels.token_sampler.count_tokens, which has checked the arguments. Slots of a call are distinct."""
    if len(slots):
        count_kernel[(len(slots),)](
            counts, slots, tokens.contiguous(), token_counts, counts.shape[1], tokens.shape[1], num_warps=1
        )
