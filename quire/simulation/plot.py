"""Runs as a picture: what was served over time, how long clients waited, and what each tenant got."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from quire.simulation.histogram import Histogram
from quire.simulation.measures import Measures, Series
from quire.simulation.run import Run


def draw(runs: Sequence[Run], path: Path) -> None:
    """Writes the picture in the format that the file's name ends with. Raises OSError, ValueError."""
    figure = Figure(figsize=(10, 6.5), layout="constrained")
    throughput, tenants, first, gap = figure.subplots(2, 2).flat
    for run in runs:
        name = run.report["policy"]
        throughput.plot(*_rates(run.measures.served), label=name)
        _curve(first, run.measures, lambda measures: measures.first_token, name)
        _curve(gap, run.measures, lambda measures: measures.token_gap, name)
        for tenant, series in zip(run.report["tenants"], run.measures.served, strict=True):
            tenants.plot(*_rates([series]), label=f"{tenant['tenant']}, {name}")
    for axes, title, x, y in (
        (throughput, "Output", "seconds", "tokens/s"),
        (tenants, "Output by tenant", "seconds", "tokens/s"),
        (first, "First token", "milliseconds", "requests, %"),
        (gap, "Next token", "milliseconds", "tokens, %"),
    ):
        axes.set_title(title)
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=80)


def _rates(served: Sequence[Series]) -> tuple[list[float], list[float]]:
    """Times and tokens per second of the sum of some series."""
    seconds = max(series.seconds for series in served)
    sums: dict[int, float] = {}
    for series in served:
        for index, amount in enumerate(series.sums):
            at = int(index * series.seconds / seconds)
            sums[at] = sums.get(at, 0.0) + amount
    count = max(sums, default=-1) + 1
    return [(at + 0.5) * seconds for at in range(count)], [sums.get(at, 0.0) / seconds for at in range(count)]


def _curve(axes: Axes, measures: Measures, chosen: Callable[[Measures], Histogram], label: str) -> None:
    points = chosen(measures).curve()
    axes.plot([1000 * value for value, _ in points], [100 * part for _, part in points], label=label)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_locator(NullLocator())
