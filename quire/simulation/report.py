"""What a run came to, as one JSON object; no wall-clock time is in it, so equal runs have equal reports."""

from __future__ import annotations

from typing import Any

from quire.simulation.histogram import Histogram
from quire.simulation.measures import Targets
from quire.simulation.world import World

PERCENTILES = (50, 90, 95, 99)
DIGITS = 4


def report(world: World, policy: str, dollars_per_hour: float) -> dict[str, Any]:
    """`dollars_per_hour`: what one executor costs."""
    scenario, measures, state = world.scenario, world.gateway.measures, world.scheduler.state
    seconds = measures.last_end
    hours = seconds / 3600 * len(world.executors)
    works = [executor.work for executor in world.executors]
    steps, busy = sum(work.steps for work in works), sum(work.busy_seconds for work in works)
    held = sum(work.held_slot_seconds for work in works)
    slots = scenario.machine.block_count * scenario.machine.block_size
    wanted = measures.prompt_tokens - measures.cached_tokens + measures.output_tokens - measures.whole_answer.count
    dollars = hours * dollars_per_hour
    has_targets = scenario.targets != Targets()
    found: dict[str, Any] = {
        "policy": policy,
        "executors": len(world.executors),
        "requests": measures.ended_count,
        "failures": dict(sorted(measures.failures.items())),
        "duration_s": _round(seconds),
        "request_s": _rate(measures.whole_answer.count, seconds),
        "output_tok_s": _rate(measures.output_tokens, seconds),
        "prompt_tok_s": _rate(measures.prompt_tokens, seconds),
        "ttft_ms": _spread(measures.first_token),
        "itl_ms": _spread(measures.token_gap),
        "e2e_ms": _spread(measures.whole_answer),
        "queue_ms": _spread(measures.queue),
        "good_share": _ratio(measures.good_count, measures.ended_count) if has_targets else None,
        "goodput_request_s": _rate(measures.good_count, seconds) if has_targets else None,
        "cached_share": _ratio(measures.cached_tokens, measures.prompt_tokens),
        "preemptions": sum(counters.preemptions for counters in state.totals.values()),
        "recomputed_tokens": max(0, sum(work.tokens for work in works) - wanted),
        "drafts_proposed": sum(work.proposed for work in works),
        "drafts_accepted": sum(work.accepted for work in works),
        "utilization": _ratio(busy, seconds * len(works)),
        "rows_per_step": _ratio(sum(work.rows for work in works), steps),
        "kv_held_share": _ratio(held, busy * slots),
        "kv_waste": _ratio(held - sum(work.filled_slot_seconds for work in works), held),
        "jain_worst": _round(measures.fairness.worst),
        "jain_mean": _round(measures.fairness.mean),
        "jain_windows": measures.fairness.window_count,
        "tenants": [
            {
                "tenant": tenant.name,
                "requests": got.requests,
                "output_tok_s": _rate(got.output_tokens, seconds),
                "ttft_ms": _spread(got.first_token),
            }
            for tenant, got in zip(scenario.tenants, measures.tenants, strict=True)
        ],
        "dollars": _round(dollars),
        "dollars_per_million_output_tokens": _ratio(dollars * 1e6, measures.output_tokens),
        "scheduler_busy_share": _ratio(world.scheduler.busy_seconds, seconds),
        "kvmanager_busy_share": _ratio(world.kvmanager.service.busy_seconds, seconds),
        "messages": world.network.message_count,
        "steps": steps,
    }
    return found


def _spread(histogram: Histogram) -> dict[str, float | None]:
    found = {"mean": histogram.mean} | {f"p{rank}": histogram.percentile(rank) for rank in PERCENTILES}
    return {name: None if value is None else _round(value * 1000) for name, value in found.items()}


def _rate(count: float, seconds: float) -> float:
    return round(count / seconds, DIGITS) if seconds > 0 else 0.0


def _ratio(part: float, whole: float) -> float | None:
    return round(part / whole, DIGITS) if whole else None


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, DIGITS)
