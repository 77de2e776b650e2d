"""Dense attention over gathered blocks, group after group."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.kv_write import NarrowBlocks
from kernels.paged_attention.plan import AttentionGroup, AttentionPlan


def paged_attention(
    queries: Tensor, cache: Tensor, plan: AttentionPlan, scale: float, colder: Sequence[NarrowBlocks] = ()
) -> Tensor:
    """Causal attention of queries [T, heads, D] over cache [2 * kv heads, blocks, block size, D], to [T, heads * D].

    Reads only the slots that the plan's sequences have written, whatever the others hold. Computes in the type of the
    queries; a narrower cache is widened as it is gathered, and so are blocks of the `colder` pools that the plan names.
    Rows that no group names are zero.
    """
    tokens, heads, width = queries.shape
    kv_heads = cache.shape[0] // 2
    if heads % kv_heads or cache.shape[3] != width:
        raise ValueError(f"paged_attention of queries {list(queries.shape)} over a cache {list(cache.shape)}")
    out = queries.new_zeros(tokens, heads * width)
    for group in plan.groups:
        if group.rows is None:
            mixed = _attend(queries[: group.part_count * group.query_count], cache, group, scale, colder)
            out[: group.part_count * group.query_count].view(mixed.shape).copy_(mixed)
        else:
            mixed = _attend(queries.index_select(0, group.rows), cache, group, scale, colder)
            out.index_copy_(0, group.rows, mixed.reshape(-1, heads * width))
    return out


def _attend(
    queries: Tensor, cache: Tensor, group: AttentionGroup, scale: float, colder: Sequence[NarrowBlocks]
) -> Tensor:
    """The group's queries [B * N, heads, D] to [B, N, kv heads, heads per kv head, D]."""
    heads, width = queries.shape[1:]
    kv_heads = cache.shape[0] // 2
    parts, count, context = group.part_count, group.query_count, group.context
    batch, used = kv_heads * parts, count * (heads // kv_heads)

    # [2 * kv heads, parts * blocks, block size * D] is [2, kv heads * parts, context, D].
    gathered = cache.flatten(2).index_select(1, group.blocks).to(queries.dtype)
    for part in group.colder:
        gathered.index_copy_(1, part.places, colder[part.pool].read(part.blocks).flatten(2).to(queries.dtype))
    keys, values = gathered.view(2, batch, context, width).unbind(0)
    if group.stale is not None:
        values.view(kv_heads, parts, context, width)[:, :, group.tail_start :].masked_fill_(group.stale, 0.0)

    # Rows of one kv head: token after token, the heads that share it together.
    make = queries.new_empty if used == group.row_count else queries.new_zeros
    rows = make((kv_heads, parts, group.row_count, width))
    by_token = rows[:, :, :used].view(kv_heads, parts, count, -1, width)
    torch.mul(queries.view(parts, count, kv_heads, -1, width).permute(2, 0, 1, 3, 4), scale, out=by_token)

    scores = torch.bmm(rows.view(batch, group.row_count, width), keys.transpose(1, 2))
    if group.hidden is not None:
        tail = scores.view(kv_heads, parts, group.row_count, context)[..., group.tail_start :]
        tail.masked_fill_(group.hidden, float("-inf"))
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(queries.dtype)
    mixed = torch.bmm(weights, values).view(kv_heads, parts, group.row_count, width)[:, :, :used]
    return mixed.view(kv_heads, parts, count, -1, width).permute(1, 2, 0, 3, 4)
