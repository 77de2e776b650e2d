"""A comparison as a picture: what quality costs in bits, and how fast each model is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure


def draw(report: Mapping[str, Any], path: Path) -> None:
    """Writes the picture in the format that the file's name ends with. Raises OSError, ValueError."""
    models = report["models"]
    figure = Figure(figsize=(11, 4 + 0.5 * len(models)), layout="constrained")
    perplexity, kl, prefill, decode = figure.subplots(2, 2).flat
    for model in models:
        low, high = model["perplexity_interval"] or (model["perplexity"], model["perplexity"])
        error = [[model["perplexity"] - low], [high - model["perplexity"]]]
        perplexity.errorbar(model["bits_per_weight"], model["perplexity"], error, fmt="o", capsize=3)
        _label(perplexity, model, "perplexity")
        if model["kl_mean"]:
            kl.plot(model["bits_per_weight"], model["kl_mean"], "o")
            _label(kl, model, "kl_mean")
    perplexity.set_title("Perplexity")
    kl.set_title("KL from the reference, nats")
    if any(model["kl_mean"] for model in models):
        kl.set_yscale("log")
    for axes in (perplexity, kl):
        axes.set_xlabel("bits per weight on disk")
        axes.grid(alpha=0.3)
    for axes, name in ((prefill, "prefill"), (decode, "decode")):
        axes.barh([model["model"] for model in models], [model[f"{name}_tok_s"] for model in models])
        axes.invert_yaxis()
        axes.set_title(f"{name.capitalize()}, tokens/s")
        axes.grid(axis="x", alpha=0.3)
    figure.savefig(path, dpi=120)


def _label(axes: Axes, model: Mapping[str, Any], value: str) -> None:
    at = (model["bits_per_weight"], model[value])
    axes.annotate(model["model"], at, xytext=(5, 4), textcoords="offset points", fontsize="small")
