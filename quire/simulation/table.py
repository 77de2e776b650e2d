"""The reports of several policies side by side, for people."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from quire.cli.tables import align

Report = dict[str, Any]


def _number(key: str, digits: int = 1) -> Callable[[Report], str]:
    return lambda report: "-" if report[key] is None else f"{report[key]:,.{digits}f}"


def _share(key: str) -> Callable[[Report], str]:
    return lambda report: "-" if report[key] is None else f"{report[key]:.1%}"


def _spread(key: str) -> Callable[[Report], str]:
    def cell(report: Report) -> str:
        found = [report[key][name] for name in ("p50", "p95", "p99")]
        return "-" if found[0] is None else " / ".join(f"{value:,.1f}" for value in found)

    return cell


EMPTY: Sequence[tuple[str, str]] = (
    ("good_share", "within targets: none were stated (--slo-ttft, --slo-itl)"),
    ("jain_worst", "Jain index: in no --window did several tenants wait throughout"),
)
"""What may have no value, and why it then has none."""

ROWS: Sequence[tuple[str, Callable[[Report], str]]] = (
    ("requests", _number("requests", 0)),
    ("failed", lambda report: f"{sum(report['failures'].values()):,}"),
    ("duration, s", _number("duration_s")),
    ("requests/s", _number("request_s", 2)),
    ("output tokens/s", _number("output_tok_s")),
    ("first token, ms p50 / p95 / p99", _spread("ttft_ms")),
    ("next token, ms", _spread("itl_ms")),
    ("whole answer, ms", _spread("e2e_ms")),
    ("queue, ms", _spread("queue_ms")),
    ("within targets", _share("good_share")),
    ("good requests/s", _number("goodput_request_s", 2)),
    ("drafts proposed", _number("drafts_proposed", 0)),
    ("drafts accepted", _number("drafts_accepted", 0)),
    ("executors busy", _share("utilization")),
    ("rows a step", _number("rows_per_step")),
    ("prompt tokens cached", _share("cached_share")),
    ("KV held", _share("kv_held_share")),
    ("of that unfilled", _share("kv_waste")),
    ("preemptions", _number("preemptions", 0)),
    ("tokens computed again", _number("recomputed_tokens", 0)),
    ("Jain index, worst window", _number("jain_worst", 3)),
    ("Jain index, mean", _number("jain_mean", 3)),
    ("dollars", _number("dollars", 2)),
    ("dollars per million tokens", _number("dollars_per_million_output_tokens", 3)),
)


def table(reports: Sequence[Report]) -> str:
    """One column for each policy; below it why rows are empty, and what each tenant got where there are several."""
    rows = [("", *(report["policy"] for report in reports))]
    rows += [(name, *(cell(report) for report in reports)) for name, cell in ROWS]
    notes = (why for key, why in EMPTY if all(report[key] is None for report in reports))
    text = "\n".join([align(rows, right=range(1, len(reports) + 1)), *notes])
    if len(reports[0]["tenants"]) < 2:
        return text
    head = ("policy", "tenant", "requests", "output tokens/s", "first token, ms p50 / p95 / p99")
    tenants = [
        (
            report["policy"],
            tenant["tenant"],
            _number("requests", 0)(tenant),
            _number("output_tok_s")(tenant),
            _spread("ttft_ms")(tenant),
        )
        for report in reports
        for tenant in report["tenants"]
    ]
    return f"{text}\n\n{align([head, *tenants], right=(2, 3, 4))}"
