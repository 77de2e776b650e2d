"""The hit rate over the size of the cache, as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure


def draw(report: dict[str, Any], path: Path) -> None:
    """Writes what `quire simulate` found in the format that the file's name ends with. Raises OSError, ValueError."""
    points = report["points"]
    if report["block_bytes"]:
        sizes, unit = [point["bytes"] / 2**30 for point in points], "GiB"
    else:
        sizes, unit = [point["blocks"] for point in points], f"blocks of {report['block_size']} tokens"
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    axes.axhline(100 * report["ideal_hit_rate"], color="0.5", linestyle="--", label="ideal, nothing forgotten")
    for name, label, style in (
        ("hit_rate", f"Quire, {report['policy']}", "o-"),
        ("plain_lru_hit_rate", "plain LRU", "s:"),
    ):
        axes.plot(sizes, [100 * point[name] for point in points], style, label=label)
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.set_xlabel(f"cache, {unit}")
    axes.set_ylabel("prompt tokens found, %")
    axes.set_title(f"{report['trace']}, {report['requests']:,} requests")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
