"""The kvmanager's metrics, read from the core when scraped: the token path writes none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from services.kvmanager.executors import Executor
from services.kvmanager.placement import Outcome
from services.kvmanager.servicer import KvManagerServicer

OTHERS = "(others)"


class KvMetrics(Collector):
    """Runs in the metrics server's thread: reads counts only, each consistent in itself."""

    def __init__(self, servicer: KvManagerServicer) -> None:
        self._servicer = servicer

    def collect(self) -> Iterable[Metric]:
        manager = self._servicer.manager
        blocks = GaugeMetricFamily("quire_kv_blocks", "Blocks by state.", labels=["executor", "state"])
        for executor_id, executor in list(manager.executors.items()):
            pools = [pool.blocks for pool in executor.pools]
            blocks.add_metric([executor_id, "free"], sum(pool.free_count for pool in pools))
            blocks.add_metric([executor_id, "cached"], sum(pool.cached_count for pool in pools))
            blocks.add_metric([executor_id, "leased"], sum(pool.leased_count for pool in pools))
        yield blocks
        reservations = CounterMetricFamily("quire_kv_reservations", "Reservations by outcome.", labels=["outcome"])
        for outcome in Outcome:
            reservations.add_metric([outcome.name.lower()], manager.outcomes[outcome])
        yield reservations
        yield CounterMetricFamily(
            "quire_kv_prefix_query_tokens", "Prompt tokens looked up.", value=manager.prefix_query_tokens
        )
        yield CounterMetricFamily("quire_kv_prefix_hit_tokens", "Prompt tokens found.", value=manager.prefix_hit_tokens)
        yield CounterMetricFamily(
            "quire_kv_evictions", "Blocks whose content was dropped to make room.", value=manager.evicted_count
        )
        yield from _by_namespace(manager.executors)
        yield from _durations(manager.executors)
        yield GaugeMetricFamily(
            "quire_kv_violations", "Findings of the last integrity check.", value=self._servicer.violation_count
        )


def _by_namespace(executors: Mapping[str, Executor]) -> Iterable[Metric]:
    """Per pool. Namespaces that were forgotten are counted together, as `OTHERS`."""
    labels = ["executor", "pool", "namespace"]
    blocks = GaugeMetricFamily("quire_kv_namespace_blocks", "Blocks held or cached.", labels=labels)
    queries = CounterMetricFamily("quire_kv_namespace_query_tokens", "Prompt tokens looked up.", labels=labels)
    hits = CounterMetricFamily("quire_kv_namespace_hit_tokens", "Prompt tokens found.", labels=labels)
    evictions = CounterMetricFamily("quire_kv_namespace_evictions", "Its blocks that made room.", labels=labels)
    for executor_id, executor in list(executors.items()):
        for pool in executor.pools:
            for name, use, block_count in [*pool.uses(), (OTHERS, pool.namespaces.others, 0)]:
                at = [executor_id, str(pool.spec.pool_id), name]
                blocks.add_metric(at, block_count)
                queries.add_metric(at, use.query_tokens)
                hits.add_metric(at, use.hit_tokens)
                evictions.add_metric(at, use.evicted_count)
    return blocks, queries, hits, evictions


def _durations(executors: Mapping[str, Executor]) -> Iterable[Metric]:
    """With vLLM's names, where one model's blocks are those of an executor's pool."""
    labels = ["executor", "pool"]
    lifetime = HistogramMetricFamily(
        "vllm:kv_block_lifetime_seconds", "From a block's content to its eviction.", labels=labels
    )
    idle = HistogramMetricFamily(
        "vllm:kv_block_idle_before_evict_seconds", "From a block's last use to its eviction.", labels=labels
    )
    reuse_gap = HistogramMetricFamily(
        "vllm:kv_block_reuse_gap_seconds", "Between uses of the last block of a prefix that was found.", labels=labels
    )
    for executor_id, executor in list(executors.items()):
        for pool in executor.pools:
            times = pool.times
            for family, histogram in (
                (lifetime, times.lifetime),
                (idle, times.idle_before_eviction),
                (reuse_gap, times.reuse_gap),
            ):
                family.add_metric([executor_id, str(pool.spec.pool_id)], histogram.cumulative(), histogram.total)
    return lifetime, idle, reuse_gap
