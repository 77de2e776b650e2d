"""Metrics of drafts: vLLM's where the meaning is the same, and our own. By model and executor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

if TYPE_CHECKING:
    from services.scheduler.state import Counters


def draft_metrics(totals: Mapping[tuple[str, int], Counters]) -> Iterable[Metric]:
    """Read when scraped, in another thread: each number is consistent in itself."""
    labels = ["model_name", "engine"]
    drafts = CounterMetricFamily("vllm:spec_decode_num_drafts", "Steps with drafts, by sequence.", labels=labels)
    tokens = CounterMetricFamily("vllm:spec_decode_num_draft_tokens", "Drafts proposed.", labels=labels)
    accepted = CounterMetricFamily("vllm:spec_decode_num_accepted_tokens", "Drafts accepted.", labels=labels)
    by_position = CounterMetricFamily(
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "Drafts accepted, by position within the step from 0.",
        labels=[*labels, "position"],
    )
    by_limit = CounterMetricFamily(
        "quire_speculation_steps", "Steps by the most drafts that they admitted.", labels=[*labels, "limit"]
    )
    saved = GaugeMetricFamily(
        "quire_speculation_saved_seconds", "What plain decoding would have taken more.", labels=labels
    )
    for (model_name, engine), counters in totals.items():
        tally, own = counters.drafts, [model_name, str(engine)]
        drafts.add_metric(own, tally.drafts)
        tokens.add_metric(own, sum(tally.proposed_by_position))
        accepted.add_metric(own, sum(tally.accepted_by_position))
        for position, count in enumerate(tally.accepted_by_position):
            by_position.add_metric([*own, str(position)], count)
        for limit, count in enumerate(tally.limits[1:], 1):
            by_limit.add_metric([*own, str(limit)], count)
        saved.add_metric(own, tally.saved_seconds)
    return drafts, tokens, accepted, by_position, by_limit, saved
