"""Drawing in four steps: rules over all tiles of a row, its least logit to be drawn, noise over all tiles, the best.

Limits are found without sorting: the values' bits, put in their order, are searched four at a time from the top.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.token_sampler import SamplingState

GREEDY_TEMPERATURE = tl.constexpr(1e-5)
TILE = 1024


@triton.jit
def ordered_bits(x):
    """fp32 as uint32 in the same order."""
    bits = x.to(tl.uint32, bitcast=True)
    return tl.where((bits >> 31) != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def value_of(bits):
    """What `ordered_bits` was given."""
    return tl.where((bits >> 31) != 0, bits ^ 0x80000000, bits ^ 0xFFFFFFFF).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["draft_count", "change_count"])
def rules_kernel(
    changed, best, logits, slots, counts, drafts, change_ids, change_values, masks, repetition, presence, frequency,
    vocabulary, stride_logits, tiles, draft_count, change_count, mask_words,
    HAS_COUNTS: tl.constexpr, HAS_DRAFTS: tl.constexpr, HAS_CHANGES: tl.constexpr, HAS_MASKS: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    """Changes, bans and penalties; and the greatest of each tile, NaN where there is one."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * N + tl.arange(0, N)
    is_token = token < vocabulary
    x = tl.load(logits + row * stride_logits + token, mask=is_token, other=float("-inf"))
    # What the model says decides whether a row can be drawn, before rules hide anything.
    is_wrong = tl.max(((x != x) | (x == float("inf"))).to(tl.int32), 0) > 0
    if HAS_CHANGES:
        for i in range(change_count):
            at = row * change_count + i
            wanted = tl.load(change_ids + at)
            if wanted >= 0:
                x = tl.where(token == wanted, x + tl.load(change_values + at), x)
    if HAS_MASKS:
        words = tl.load(masks + row * mask_words + token // 32, mask=is_token, other=0)
        x = tl.where(((words >> (token % 32)) & 1) != 0, x, float("-inf"))
    if HAS_COUNTS:
        slot = tl.load(slots + row)
        if slot >= 0:
            seen = tl.load(counts + slot.to(tl.int64) * vocabulary + token, mask=is_token, other=0)
            if HAS_DRAFTS:
                for i in range(draft_count):
                    seen += tl.where(token == tl.load(drafts + row * draft_count + i), 2, 0)
            penalty = tl.load(repetition + row)
            x = tl.where(seen != 0, tl.where(x > 0, tl.div_rn(x, penalty), x * penalty), x)
            lowered = tl.load(frequency + row) * (seen >> 1).to(tl.float64) + tl.load(presence + row)
            x = tl.where(seen > 1, x - lowered.to(tl.float32), x)
    tl.store(changed + row * vocabulary + token, x, mask=is_token)
    tl.store(best + row * tiles + tl.program_id(1), tl.where(is_wrong, float("nan"), tl.max(x, 0)))


@triton.jit
def find_floor(changed, top, heat, floor, target, vocabulary, BY_WEIGHT: tl.constexpr, N: tl.constexpr):
    """The greatest of a row's scaled logits so that those not below it, of those not below `floor`, are `target` many,
    or weigh `target` of all."""
    place = tl.arange(0, N)
    digits = tl.arange(0, 16)
    prefix = tl.cast(0, tl.uint32)
    above = tl.cast(0.0, tl.float64)
    for step in range(8):
        shift = 28 - 4 * step
        sums = tl.zeros([16], tl.float64)
        for start in range(0, vocabulary, N):
            token = start + place
            x = tl.load(changed + token, mask=token < vocabulary, other=float("-inf"))
            scaled = tl.div_rn(x - top, heat)
            bits = ordered_bits(scaled)
            counted = (token < vocabulary) & (scaled >= floor) & (((bits >> shift) >> 4) == prefix)
            if BY_WEIGHT:
                weight = tl.exp(scaled).to(tl.float64)
            else:
                weight = tl.full([N], 1.0, tl.float64)
            digit = ((bits >> shift) & 15).to(tl.int32)
            hits = (digit[:, None] == digits[None, :]) & counted[:, None]
            sums += tl.sum(tl.where(hits, weight[:, None], 0.0), 0)
        if BY_WEIGHT:
            target = tl.where(step == 0, target * tl.sum(sums, 0), target)
        # The highest digit with which the target is reached; where rounding keeps all below it, the lowest.
        reached = above + tl.sum(tl.where(digits[None, :] >= digits[:, None], sums[None, :], 0.0), 1)
        exists = sums > 0
        found = tl.max(tl.where(exists & (reached >= target), digits, -1), 0)
        lowest = tl.min(tl.where(exists, digits, 15), 0)
        found = tl.where(found < 0, lowest, found)
        above += tl.sum(tl.where(digits > found, sums, 0.0), 0)
        prefix = (prefix << 4) | found.to(tl.uint32)
    return value_of(prefix)


@triton.jit
def limits_kernel(
    floors, tops, best, changed, temperature, top_k, top_p, min_p_floor, vocabulary, tiles,
    N: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Each row's greatest logit, and the least scaled one that may be drawn. NaN as greatest: nothing can be."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, TILES)
    each = tl.load(best + row * tiles + at, mask=at < tiles, other=float("-inf"))
    is_wrong = tl.max((each != each).to(tl.int32), 0) > 0
    top = tl.max(each, 0)
    is_wrong = is_wrong | (top == float("-inf")) | (top == float("inf"))
    tl.store(tops + row, tl.where(is_wrong, float("nan"), top))
    heat = tl.load(temperature + row)
    k = tl.load(top_k + row)
    p = tl.load(top_p + row)
    floor = tl.cast(float("-inf"), tl.float32)
    if (heat >= GREEDY_TEMPERATURE) & (is_wrong == 0):
        here = changed + row * vocabulary
        if (k > 0) & (k < vocabulary):
            floor = find_floor(here, top, heat, floor, k.to(tl.float64), vocabulary, False, N)
        if p < 1.0:
            floor = find_floor(here, top, heat, floor, p, vocabulary, True, N)
    tl.store(floors + row, tl.maximum(floor, tl.load(min_p_floor + row)))


@triton.jit
def noise_kernel(
    values, ids, changed, floors, tops, temperature, top_k, top_p, seeds, choices, positions, vocabulary, tiles,
    N: tl.constexpr,
):  # fmt: skip
    """The best of each tile with its noise: Philox4x32-10 as services/executor/sampling/philox.py lays it out."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * N + tl.arange(0, N)
    is_token = token < vocabulary
    x = tl.load(changed + row * vocabulary + token, mask=is_token, other=float("-inf"))
    heat = tl.load(temperature + row)
    if (heat >= GREEDY_TEMPERATURE) & (tl.load(top_k + row) != 1) & (tl.load(top_p + row) > 0.0):
        scaled = tl.div_rn(x - tl.load(tops + row), heat)
        none = token * 0
        w0, w1, w2, w3 = tl.philox(
            tl.load(seeds + row), token // 4, none + tl.load(positions + row), none + tl.load(choices + row), none
        )
        lane = token % 4
        word = tl.where(lane == 0, w0, tl.where(lane == 1, w1, tl.where(lane == 2, w2, w3))).to(tl.uint32, bitcast=True)
        uniform = ((word >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07
        noisy = scaled - tl.log(-tl.log(uniform))
        x = tl.where(is_token & (scaled >= tl.load(floors + row)), noisy, float("-inf"))
    greatest = tl.max(x, 0)
    tl.store(values + row * tiles + tl.program_id(1), greatest)
    tl.store(ids + row * tiles + tl.program_id(1), tl.min(tl.where(x == greatest, token, vocabulary), 0))


@triton.jit
def best_kernel(tokens, values, ids, tops, vocabulary, tiles, TILES: tl.constexpr):
    """The lowest id among the best."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, TILES)
    each = tl.load(values + row * tiles + at, mask=at < tiles, other=float("-inf"))
    token = tl.load(ids + row * tiles + at, mask=at < tiles, other=vocabulary)
    found = tl.min(tl.where(each == tl.max(each, 0), token, vocabulary), 0)
    top = tl.load(tops + row)
    tl.store(tokens + row, tl.where((top != top) | (found >= vocabulary), -1, found))


def draw_tokens(logits: Tensor, state: SamplingState) -> Tensor:
    """As kernels.token_sampler.draw_tokens, which has checked the arguments."""
    rows, vocabulary = logits.shape
    tokens = torch.empty(rows, dtype=torch.int32, device=logits.device)
    if not rows:
        return tokens
    tiles = triton.cdiv(vocabulary, TILE)
    padded = triton.next_power_of_2(tiles)
    changed = logits.new_empty((rows, vocabulary))
    values, floors, tops = logits.new_empty((rows, tiles)), logits.new_empty(rows), logits.new_empty(rows)
    ids = torch.empty((rows, tiles), dtype=torch.int32, device=logits.device)
    unused = tokens
    rules_kernel[(rows, tiles)](
        changed, values, logits, _or(state.slots, unused), _or(state.counts, unused), _or(state.drafts, unused),
        _or(state.change_ids, unused), _or(state.change_values, unused), _or(state.masks, unused),
        state.repetition, state.presence, state.frequency, vocabulary, logits.stride(0), tiles,
        0 if state.drafts is None else state.drafts.shape[1],
        0 if state.change_ids is None else state.change_ids.shape[1],
        0 if state.masks is None else state.masks.shape[1],
        HAS_COUNTS=state.counts is not None, HAS_DRAFTS=state.drafts is not None,
        HAS_CHANGES=state.change_ids is not None, HAS_MASKS=state.masks is not None, N=TILE, num_warps=4,
    )  # fmt: skip
    limits_kernel[(rows,)](
        floors, tops, values, changed, state.temperature, state.top_k, state.top_p, state.min_p_floor, vocabulary,
        tiles, N=min(TILE, max(16, triton.next_power_of_2(vocabulary))), TILES=padded, num_warps=16,
    )  # fmt: skip
    noise_kernel[(rows, tiles)](
        values, ids, changed, floors, tops, state.temperature, state.top_k, state.top_p, state.seeds, state.choices,
        state.positions, vocabulary, tiles, N=TILE, num_warps=4,
    )  # fmt: skip
    best_kernel[(rows,)](tokens, values, ids, tops, vocabulary, tiles, TILES=padded, num_warps=1)
    return tokens


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    return other if tensor is None else tensor
