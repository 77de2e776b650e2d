"""The results: one table of bars and the figures behind it as Markdown, all measurements as JSON, a plot."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median

from benchmarks.peers.bars import Row, rows
from benchmarks.peers.plot import bar_chart
from benchmarks.peers.samples import OURS, Record, Sample, ratios

PLOTTED = ("decode 1", "decode 8", "decode 16", "decode 32", "prefill 512")


def text(machine: Mapping[str, str], record: Record) -> str:
    """All tables."""
    suites = dict.fromkeys(sample.suite for sample in record.samples)
    where = f"{machine['cpu']}: {machine['instruction set']}; {machine['threads']} threads"
    parts = [where, bars_table(rows(record.samples)), *(figures_table(record.samples, suite) for suite in suites)]
    return "\n\n".join([*parts, facts_table(record.facts)])


def write(folder: Path, machine: Mapping[str, str], arguments: str, record: Record) -> None:
    """result.json with every single measurement, result.md and, where engines were measured, engines.svg."""
    result = {
        "machine": dict(machine),
        "arguments": arguments,
        "contestants": record.facts,
        "bars": [asdict(row) | {"measured": row.measured, "verdict": row.verdict} for row in rows(record.samples)],
        "samples": [asdict(sample) for sample in record.samples],
    }
    (folder / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    (folder / "result.md").write_text(text(machine, record) + "\n")
    if panels := _panels(record.samples):
        (folder / "engines.svg").write_text(bar_chart("Tokens per second, medians of rounds", panels, OURS))


def bars_table(rows: Sequence[Row]) -> str:
    """Bar, aim, median of the rounds with its range, verdict."""
    lines = ["| | bar | aim | measured | range | rounds | |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        sign = "at most " if row.less_is_better else ""
        low, high = min(row.values), max(row.values)
        cells = [
            row.title,
            f"{sign}{_short(row.bar)} {row.unit}",
            f"{sign}{_short(row.aim)} {row.unit}",
            f"**{_short(row.measured)}** {row.unit}",
            f"{_short(low)} to {_short(high)}",
            str(len(row.values)),
            row.verdict,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def figures_table(samples: Sequence[Sample], suite: str) -> str:
    """Medians of a suite, a column per contestant; with each peer's figure, the median ratio of Quire to it."""
    own = [sample for sample in samples if sample.suite == suite]
    contestants = list(dict.fromkeys(sample.contestant for sample in own))
    lines = [f"| {suite} | {' | '.join(contestants)} |", "|---" * (len(contestants) + 1) + "|"]
    for name in dict.fromkeys(name for sample in own for name in sample.figures):
        cells = []
        for contestant in contestants:
            values = [s.figures[name] for s in own if s.contestant == contestant and name in s.figures]
            found = list(ratios(own, name, contestant).values())
            ratio = f" ({median(found):.2f}x)" if found else ""
            cells.append(f"{_short(median(values))}{ratio}" if values else "")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def facts_table(facts: Mapping[str, Mapping[str, str]]) -> str:
    """Versions, formats, instruction sets and threads of the contestants."""
    lines = ["| contestant | |", "|---|---|"]
    lines += [
        f"| {name} | {', '.join(f'{key} {value}' for key, value in known.items())} |" for name, known in facts.items()
    ]
    return "\n".join(lines)


def _panels(samples: Sequence[Sample]) -> dict[str, dict[str, float]]:
    """Medians of the engines, by figure and contestant."""
    panels: dict[str, dict[str, list[float]]] = {name: {} for name in PLOTTED}
    for sample in samples:
        for name in PLOTTED:
            if sample.suite == "engine" and name in sample.figures:
                panels[name].setdefault(sample.contestant, []).append(sample.figures[name])
    return {
        name: {contestant: median(values) for contestant, values in panel.items()}
        for name, panel in panels.items()
        if panel
    }


def _short(value: float) -> str:
    """Three significant digits, without an exponent."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
