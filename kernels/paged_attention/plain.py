"""Attention over a mixed batch as plainly as it can be said: query after query, in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.paged_attention.mixed import AttentionRule, MixedBatch, PagedKv


def mixed_attention(queries: Tensor, kv: PagedKv, batch: MixedBatch, rule: AttentionRule) -> Tensor:
    """As kernels.paged_attention.mixed_attention, to float64. Rows that no sequence has are zero."""
    tokens, heads, width = queries.shape
    out = torch.zeros(tokens, heads, width, dtype=torch.float64, device=queries.device)
    starts = batch.query_starts.tolist()
    for i, length in enumerate(batch.context_lengths.tolist()):
        keys, values = _read(kv, batch.block_tables[i], length).repeat_interleave(heads // (len(kv.hot) // 2), 1)
        for row in range(starts[i], starts[i + 1]):
            end = length - (starts[i + 1] - row) + 1
            first = max(0, end - rule.window) if rule.window else 0
            scores = torch.einsum("hd,hnd->hn", queries[row].double(), keys[:, first:end]) * rule.scale
            if rule.soft_cap:
                scores = rule.soft_cap * torch.tanh(scores / rule.soft_cap)
            if rule.sinks is not None:
                scores = torch.cat((scores, rule.sinks.double()[:, None]), 1)
            weights = torch.softmax(scores, 1)[:, : end - first]
            out[row] = torch.einsum("hn,hnd->hd", weights, values[:, first:end])
    return out.view(tokens, heads * width)


def _read(kv: PagedKv, table: Tensor, length: int) -> Tensor:
    """Keys and values [2, kv heads, length, D] of a sequence, float64."""
    starts, size = kv.pool_starts, kv.hot.shape[2]
    found = []
    for block in table[: -(-length // size)].tolist():
        pool = sum(block >= start for start in starts[1:-1])
        if pool == 0:
            found.append(kv.hot[:, block].double())
        else:
            place = torch.tensor([block - starts[pool]], device=table.device)
            found.append(kv.colder[pool - 1].read(place)[:, 0].double())
    joined = torch.cat(found, 1)[:, :length]
    return joined.view(2, -1, length, joined.shape[2])
