"""A comparison as text: a row per model, then each model against the next worse one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from services.executor.eval.bootstrap import CONFIDENCE

_HEAD = ("model", "size", "bits/weight", "perplexity", "interval", "KL", "top-1", "prefill tok/s", "decode tok/s")


def table(report: Mapping[str, Any]) -> str:
    """What `quire eval compare` found."""
    models = report["models"]
    rows = [_HEAD, *map(_row, models)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "{backend} {dtype}, KV {kv_format}  {device}".format_map(models[0]),
        f"{report['scored']:,} tokens in {report['windows']:,} windows of {report['context']} that begin "
        f"{report['stride']} apart; intervals hold at {CONFIDENCE:.0%}",
        "",
        *(_line(row, widths) for row in rows),
    ]
    if len(models) > 1:
        lines += ["", "nats per token by which each is better than the next:", *_ranking(report["differences"])]
    return "\n".join(lines)


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    name, *numbers = row
    return "  ".join(
        (name.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(numbers, widths[1:], strict=True)))
    )


def _row(model: Mapping[str, Any]) -> tuple[str, ...]:
    interval, kl, same = (model[name] for name in ("perplexity_interval", "kl_mean", "top1_agreement"))
    return (
        model["model"],
        f"{model['bytes'] / 1e6:,.1f} MB",
        f"{model['bits_per_weight']:.2f}",
        f"{model['perplexity']:.3f}",
        "-" if interval is None else "{:.3f} to {:.3f}".format(*interval),
        "-" if kl is None else f"{kl:.2e}",
        "-" if same is None else f"{same:.2%}",
        f"{model['prefill_tok_s']:.1f}",
        f"{model['decode_tok_s']:.1f}",
    )


def _ranking(pairs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Each model against the one that comes after it."""
    first: dict[str, Mapping[str, Any]] = {}
    for pair in pairs:
        first.setdefault(pair["better"], pair)
    return [_against(pair) for pair in first.values()]


def _against(pair: Mapping[str, Any]) -> str:
    interval = "" if pair["interval"] is None else " ({:+.4f} to {:+.4f})".format(*pair["interval"])
    doubt = "" if pair["is_certain"] else ", which may be chance"
    return f"  {pair['better']} before {pair['worse']}: {pair['nats_per_token']:+.4f}{interval}{doubt}"
