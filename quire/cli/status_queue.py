"""`quire status --queue`: who waits, who was admitted, what else was decided, and why; what tenants were served."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.cli.tables import align

_COUNTS = ("waiting_count", "running_count", "prompt_tokens", "output_tokens")


def queue_report(scheduler: Mapping[str, Any]) -> dict[str, Any]:
    """The queues as data, from GetSchedulerStatusResponse as `plain` gives it. Times are in seconds."""
    refusals = {one["reason"]: one["count"] for one in scheduler["refusals"]}
    return {"models": scheduler["queues"], "refusals": refusals, "decisions": scheduler["decisions"]}


def queue_text(report: Mapping[str, Any]) -> str:
    """`queue_report` as tables."""
    parts = [part for queue in report["models"] for part in _queue(queue)] or ["no models"]
    if report["refusals"]:
        counts = ", ".join(f"{count:,} {reason}" for reason, count in report["refusals"].items())
        parts.append(f"refused: {counts}")
    if report["decisions"]:
        parts.append(_decisions(report["decisions"]))
    return "\n\n".join(parts)


def _queue(queue: Mapping[str, Any]) -> list[str]:
    counts = f"{queue['running_count']:,} sequences run, {queue['waiting_count']:,} wait"
    parts = [f"{queue['model']}: {counts}; policy {queue['policy']}"]
    if queue["tenants"]:
        parts.append(_tenants(queue["tenants"]))
    if queue["waiting"]:
        parts.append(_waiting(queue["waiting"], queue["waiting_count"]))
    if queue["admissions"]:
        parts.append(_admissions(queue["admissions"]))
    return parts


def _tenants(tenants: Sequence[Mapping[str, Any]]) -> str:
    rows = [("TENANT", "WEIGHT", "WAITING", "RUNNING", "PROMPT TOKENS", "OUTPUT TOKENS", "SHARE")]
    for tenant in tenants:
        waiting, running, prompt, output = (f"{tenant[field]:,}" for field in _COUNTS)
        name, weight = tenant["tenant"] or "(none)", f"{tenant['weight']:g}"
        rows.append((name, weight, waiting, running, prompt, output, f"{tenant['share']:.0%}"))
    return align(rows, right=range(1, 7))


def _waiting(waiting: Sequence[Mapping[str, Any]], count: int) -> str:
    rows = [("NEXT", "TENANT", "PRIORITY", "WAITED", "TOKENS", "WHY IT WAITS")]
    for one in waiting:
        numbers = (str(one["priority"]), f"{one['waited_seconds']:.1f} s", f"{one['token_count']:,}")
        rows.append((_name(one), one["tenant"] or "(none)", *numbers, one["reason"]))
    more = count - len(waiting)
    return align(rows, right=(2, 3, 4)) + (f"\nand {more:,} more" if more > 0 else "")


def _admissions(admissions: Sequence[Mapping[str, Any]]) -> str:
    rows = [("ADMITTED", "TENANT", "AGO", "WAITED", "EXECUTOR", "WHY")]
    for one in admissions:
        times = (f"{one['age_seconds']:.1f} s", f"{one['waited_seconds']:.1f} s")
        why = "; ".join([one["reason"], *one["placement_reasons"]])
        rows.append((_name(one), one["tenant"] or "(none)", *times, one["target"], why))
    return align(rows, right=(2, 3))


def _decisions(decisions: Sequence[Mapping[str, Any]]) -> str:
    rows = [("DECIDED", "REQUEST", "TENANT", "MODEL", "AGO", "WHY")]
    for one in decisions:
        who = (_name(one), one["tenant"] or "(none)", one["model"] or "(none)")
        rows.append((one["what"], *who, f"{one['age_seconds']:.1f} s", one["reason"]))
    return align(rows, right=(4,))


def _name(sequence: Mapping[str, Any]) -> str:
    """The request, and the choice where it is not the first."""
    choice = sequence["choice"]
    return f"{sequence['request_id']}/{choice}" if choice else str(sequence["request_id"])
