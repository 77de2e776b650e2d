"""Draws tokens on a GPU: rules, limits and noise of services/executor/sampling/draw.py, scores of its scores.py."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["SamplingState", "TokenScores", "accept_drafts", "count_tokens", "draw_tokens", "score_tokens"]


@dataclass(frozen=True, slots=True)
class SamplingState:
    """How R rows sample; all on the device, so that a captured graph reads what the last step left.

    Rows that share a sequence, one for each draft before it, share its slot of `counts`.
    """

    temperature: Tensor  # [R] fp32; greedy: 0
    top_k: Tensor  # [R] int32; 0 keeps all
    top_p: Tensor  # [R] fp64; 1 keeps all
    min_p_floor: Tensor  # [R] fp32: log(min_p); -inf keeps all
    repetition: Tensor  # [R] fp32; 1 changes nothing
    presence: Tensor  # [R] fp64
    frequency: Tensor  # [R] fp64
    seeds: Tensor  # [R] int64
    choices: Tensor  # [R] int32
    positions: Tensor  # [R] int32: of the token in the output, from 0
    slots: Tensor | None = None  # [R] int32: the row's place in `counts`; below 0: no penalties
    counts: Tensor | None = None  # [slots, V] int32: 2 * times in the output + 1 where it is in the prompt
    drafts: Tensor | None = None  # [R, D] int32: tokens that count as output too; below 0: none
    change_ids: Tensor | None = None  # [R, C] int32, distinct in a row: tokens whose logits change; below 0: none
    change_values: Tensor | None = None  # [R, C] fp32: what is added to them; -inf bans
    masks: Tensor | None = None  # [R, ceil(V / 32)] int32: bit i % 32 of word i // 32 allows token i


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Log probabilities of the raw logits, as services/executor/sampling/scores.py has them."""

    chosen: Tensor  # [R] fp32
    ranks: Tensor  # [R] int32, from 1
    top_ids: Tensor  # [R, n] int32
    top_logprobs: Tensor  # [R, n] fp32


_TYPES = {
    "temperature": torch.float32, "top_k": torch.int32, "top_p": torch.float64, "min_p_floor": torch.float32,
    "repetition": torch.float32, "presence": torch.float64, "frequency": torch.float64, "seeds": torch.int64,
    "choices": torch.int32, "positions": torch.int32,
}  # fmt: skip


def draw_tokens(logits: Tensor, state: SamplingState) -> Tensor:
    """A token [R] int32 per row of logits [R, V] fp32; -1 where a row has NaN, +inf or nothing that rules leave."""
    rows, vocabulary = logits.shape
    _check_logits(logits)
    for name, dtype in _TYPES.items():
        part: Tensor = getattr(state, name)
        if part.shape != (rows,) or part.dtype != dtype:
            raise ValueError(f"draw_tokens of {rows} rows: {name} is {list(part.shape)} {part.dtype}, not {dtype}")
    if (state.slots is None) != (state.counts is None):
        raise ValueError("draw_tokens: slots and counts come together")
    if state.counts is not None and (state.counts.shape[1] != vocabulary or state.counts.dtype != torch.int32):
        raise ValueError(f"draw_tokens of {vocabulary} tokens: counts are {list(state.counts.shape)}")
    if (state.change_ids is None) != (state.change_values is None):
        raise ValueError("draw_tokens: change_ids and change_values come together")
    if state.masks is not None and state.masks.shape != (rows, -(-vocabulary // 32)):
        raise ValueError(f"draw_tokens of {vocabulary} tokens: masks are {list(state.masks.shape)}")
    from kernels.token_sampler import triton_impl

    return triton_impl.draw_tokens(logits, state)


def score_tokens(logits: Tensor, targets: Tensor, count: int) -> TokenScores:
    """Scores targets [R] int32 under logits [R, V] fp32 with min(count, V) alternatives; NaN where a row is not finite.

    A target below 0 scores NaN.
    """
    _check_logits(logits)
    if targets.shape != (len(logits),) or targets.dtype != torch.int32 or count < 0:
        raise ValueError(f"score_tokens of {list(targets.shape)} {targets.dtype} with {count} alternatives")
    from kernels.token_sampler import triton_scores

    return triton_scores.score_tokens(logits, targets, min(count, logits.shape[1]))


def accept_drafts(drawn: Tensor, drafts: Tensor, row_starts: Tensor) -> tuple[Tensor, Tensor]:
    """How many drafts of each of S sequences hold [S] int32, and the token after them [S] int32.

    Sequence s drew rows row_starts[s] .. row_starts[s + 1] of drawn [R], one more than it has drafts; drafts [S, D]
    int32. A draft holds where the target drew the same and all before it hold. -1 where nothing could be drawn.
    """
    if drafts.dim() != 2 or row_starts.shape != (len(drafts) + 1,) or drawn.dim() != 1:
        raise ValueError(f"accept_drafts of {list(drafts.shape)} with {list(row_starts.shape)}")
    from kernels.token_sampler import triton_accept

    return triton_accept.accept_drafts(drawn, drafts, row_starts)


def count_tokens(counts: Tensor, slots: Tensor, tokens: Tensor, token_counts: Tensor) -> None:
    """Adds to counts [slots, V] that tokens [S, D] int32, the first token_counts[s] of each row, were put out."""
    if tokens.dim() != 2 or slots.shape != (len(tokens),) or token_counts.shape != slots.shape:
        raise ValueError(f"count_tokens of {list(tokens.shape)} for {list(slots.shape)}")
    from kernels.token_sampler import triton_accept

    triton_accept.count_tokens(counts, slots, tokens, token_counts)


def _check_logits(logits: Tensor) -> None:
    if logits.dim() != 2 or logits.dtype != torch.float32 or logits.stride(1) != 1:
        raise ValueError(f"logits {list(logits.shape)} {logits.dtype}, not [rows, tokens] in fp32")
