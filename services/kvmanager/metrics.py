"""The kvmanager's metrics, read from the core when scraped: the token path writes none."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.kvmanager.placement import Outcome
from services.kvmanager.servicer import KvManagerServicer


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
        yield GaugeMetricFamily(
            "quire_kv_violations", "Findings of the last integrity check.", value=self._servicer.violation_count
        )
