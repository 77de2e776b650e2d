"""The scheduler's metrics, read when scraped: the token path writes none. Names and labels are vLLM's."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.scheduler.speculation.metrics import draft_metrics
from services.scheduler.state import Executor, State

LABELS = ["model_name", "engine"]
TENANTS = 20
"""So many are told apart, by model: what labels a client chooses must not grow without bound."""
COUNTERS = {
    "vllm:num_preemptions": ("Sequences that gave up their blocks.", "preemptions"),
    "vllm:prompt_tokens": ("Prompt tokens of requests that were placed.", "prompt_tokens"),
    "vllm:generation_tokens": ("Output tokens.", "output_tokens"),
    "vllm:prefix_cache_queries": ("Tokens looked up in the prefix cache.", "prefix_query_tokens"),
    "vllm:prefix_cache_hits": ("Tokens found in the prefix cache.", "prefix_hit_tokens"),
}


class SchedulerMetrics(Collector):
    """Runs in the metrics server's thread: reads counts only, each consistent in itself.

    An engine is an executor, by its number: as in the settings, then as they were added. What waits has none yet and
    counts for a model's first.
    """

    def __init__(self, state: State) -> None:
        self._state = state

    def collect(self) -> Iterable[Metric]:
        totals = dict(self._state.totals)
        for name, (text, field) in COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=LABELS)
            for (model_name, engine), counters in totals.items():
                counter.add_metric([model_name, str(engine)], getattr(counters, field))
            yield counter
        yield from draft_metrics(totals)
        running = GaugeMetricFamily("vllm:num_requests_running", "Sequences that hold blocks.", labels=LABELS)
        usage = GaugeMetricFamily("vllm:kv_cache_usage_perc", "Part of the blocks held, 0 to 1.", labels=LABELS)
        first: dict[str, int] = {}
        for executor in self._state.executors:
            if (model := executor.model) is not None:
                first.setdefault(model.name, executor.index)
                running.add_metric([model.name, str(executor.index)], len(executor.running))
                usage.add_metric([model.name, str(executor.index)], _usage(executor))
        yield running
        yield usage
        waiting = GaugeMetricFamily("vllm:num_requests_waiting", "Sequences that wait for blocks.", labels=LABELS)
        for name in list(self._state.models):
            waiting.add_metric([name, str(first.get(name, 0))], self._state.waiting_count_of(name))
        yield waiting
        yield from self._tenants()
        refusals = CounterMetricFamily("quire_scheduler_refusals", "New requests refused.", labels=["reason"])
        for reason, count in list(self._state.refusals.items()):
            refusals.add_metric([reason], count)
        yield refusals
        yield GaugeMetricFamily("quire_scheduler_gateways", "Gateways connected.", value=len(self._state.gateways))
        yield GaugeMetricFamily(
            "quire_scheduler_executors", "Executors connected.", value=sum(e.connected for e in self._state.executors)
        )

    def _tenants(self) -> Iterable[Metric]:
        """The queue by tenant: those with most sequences by name, all others as one without a name."""
        labels = ["model_name", "tenant"]
        waiting = GaugeMetricFamily("quire_scheduler_tenant_waiting", "Sequences that wait for blocks.", labels=labels)
        running = GaugeMetricFamily("quire_scheduler_tenant_running", "Sequences that hold blocks.", labels=labels)
        for name, model in list(self._state.models.items()):
            accounts = sorted(model.ledger.accounts(), key=lambda account: -account.live_count)
            counts: dict[str, list[int]] = {}
            for place, account in enumerate(accounts):
                count = counts.setdefault(account.tenant if place < TENANTS else "", [0, 0])
                count[0] += account.waiting_count
                count[1] += account.running_count
            for tenant, (waits, runs) in counts.items():
                waiting.add_metric([name, tenant], waits)
                running.add_metric([name, tenant], runs)
        yield waiting
        yield running


def _usage(executor: Executor) -> float:
    if executor.available_blocks is None or executor.total_blocks == 0:
        return 0.0
    return min(1.0, max(0.0, 1.0 - executor.available_blocks / executor.total_blocks))
