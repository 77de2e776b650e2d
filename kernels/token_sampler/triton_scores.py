"""Log probabilities of one row per program: its sum, a rank, and the likeliest tokens one after the other."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.token_sampler import TokenScores

TILE = 4096


@triton.jit(do_not_specialize=["count"])
def scores_kernel(
    chosen, ranks, top_ids, top_logprobs, logits, targets, vocabulary, stride_logits, count, N: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    here = logits + row * stride_logits
    place = tl.arange(0, N)
    tops = tl.full([N], float("-inf"), tl.float32)
    wrong = tl.zeros([N], tl.int32)
    for start in range(0, vocabulary, N):
        x = tl.load(here + start + place, mask=start + place < vocabulary, other=float("-inf"))
        wrong = wrong | ((x != x) | (x == float("inf"))).to(tl.int32)
        tops = tl.maximum(tops, x)
    top = tl.max(tops, 0)
    sums = tl.zeros([N], tl.float64)
    for start in range(0, vocabulary, N):
        x = tl.load(here + start + place, mask=start + place < vocabulary, other=float("-inf"))
        sums += tl.exp(x - top).to(tl.float64)
    is_wrong = (tl.max(wrong, 0) > 0) | (top == float("-inf"))
    whole = tl.where(is_wrong, float("nan"), tl.log(tl.sum(sums, 0))).to(tl.float32)

    target = tl.load(targets + row)
    is_wrong = is_wrong | (target < 0)
    logprob = tl.load(here + tl.maximum(target, 0)) - top - whole
    above = tl.zeros([N], tl.int32)
    for start in range(0, vocabulary, N):
        x = tl.load(here + start + place, mask=start + place < vocabulary, other=float("-inf"))
        above += (x - top - whole > logprob).to(tl.int32)
    tl.store(chosen + row, tl.where(is_wrong, float("nan"), tl.maximum(logprob, -9999.0)))
    tl.store(ranks + row, tl.sum(above, 0) + 1)

    last = tl.cast(float("inf"), tl.float32)
    last_id = tl.cast(-1, tl.int32)
    for i in range(count):
        # The next in descending order; of equal ones, the next id.
        best = tl.cast(float("-inf"), tl.float32)
        best_id = tl.cast(vocabulary, tl.int32)
        for start in range(0, vocabulary, N):
            token = start + place
            x = tl.load(here + token, mask=token < vocabulary, other=float("-inf")) - top - whole
            is_next = (token < vocabulary) & ((x < last) | ((x == last) & (token > last_id)))
            greatest = tl.max(tl.where(is_next, x, float("-inf")), 0)
            first = tl.min(tl.where(is_next & (x == greatest), token, vocabulary), 0)
            is_better = (greatest > best) | ((greatest == best) & (first < best_id))
            best = tl.where(is_better, greatest, best)
            best_id = tl.where(is_better, first, best_id)
        tl.store(top_ids + row * count + i, tl.where(best_id < vocabulary, best_id, i))
        tl.store(top_logprobs + row * count + i, tl.where(is_wrong, float("nan"), tl.maximum(best, -9999.0)))
        last = best
        last_id = best_id


def score_tokens(logits: Tensor, targets: Tensor, count: int) -> TokenScores:
    """As kernels.token_sampler.score_tokens, which has checked the arguments."""
    rows, vocabulary = logits.shape
    ranks = torch.empty(rows, dtype=torch.int32, device=logits.device)
    ids = torch.empty((rows, count), dtype=torch.int32, device=logits.device)
    found = TokenScores(logits.new_empty(rows), ranks, ids, logits.new_empty((rows, count)))
    if rows:
        scores_kernel[(rows,)](
            found.chosen, ranks, ids, found.top_logprobs, logits, targets, vocabulary, logits.stride(0), count,
            N=min(TILE, max(16, triton.next_power_of_2(vocabulary))), num_warps=8,
        )  # fmt: skip
    return found
