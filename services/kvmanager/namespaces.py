"""What tenants use of the caches, over all executors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from services.kvmanager.executors import Executor


class NamespaceTotals(NamedTuple):
    """What a namespace asked, found and has."""

    name: str
    query_tokens: int
    hit_tokens: int
    block_count: int


def namespace_totals(executors: Iterable[Executor]) -> list[NamespaceTotals]:
    """Of each namespace seen of late, in all hot pools; those with the most blocks first."""
    totals: dict[str, NamespaceTotals] = {}
    for executor in executors:
        for pool in executor.hot_pools:
            for name, use, block_count in pool.uses():
                before = totals.get(name, NamespaceTotals(name, 0, 0, 0))
                totals[name] = NamespaceTotals(
                    name,
                    before.query_tokens + use.query_tokens,
                    before.hit_tokens + use.hit_tokens,
                    before.block_count + block_count,
                )
    return sorted(totals.values(), key=lambda total: (-total.block_count, total.name))
