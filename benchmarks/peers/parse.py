"""Reads what the contestants print. Pure functions; they raise ValueError where the text is not as expected."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def last_json(text: str) -> dict[str, Any]:
    """The object on the last line that holds one."""
    for line in reversed(text.splitlines()):
        if line.startswith("{"):
            found: dict[str, Any] = json.loads(line)
            return found
    raise ValueError(f"no line of JSON in {text[-500:]!r}")


def engine_points(report: Mapping[str, Any], prompt: int) -> dict[str, float]:
    """Figures of `quire bench engine --json`, whose points have a batch, a prefill and a decode rate."""
    figures = {}
    for point in report["points"]:
        figures[f"prefill {point['batch']}x{prompt}"] = float(point["prefill_tok_s"])
        figures[f"decode {point['batch']}"] = float(point["decode_tok_s"])
    return figures


def llama_bench(text: str) -> dict[str, float]:
    """Figures of `llama-bench -o jsonl`: one line per test, the best of its repetitions counts."""
    figures = {}
    for line in text.splitlines():
        if not line.startswith("{"):
            continue
        test = json.loads(line)
        best = max(test["samples_ts"])
        if test["n_gen"] == 0:
            figures[f"prefill {test['n_prompt']}"] = best
        elif test["n_prompt"] == 0:
            figures["decode 1"] = best
    if not figures:
        raise ValueError(f"no test in {text[-500:]!r}")
    return figures


def llama_batched_bench(text: str) -> dict[str, float]:
    """Figures of `llama-batched-bench --output-format jsonl`; the best of equal batches counts."""
    figures: dict[str, float] = {}
    for line in text.splitlines():
        if not line.startswith('{"n_kv_max"'):
            continue
        test = json.loads(line)
        for name, key in ((f"prefill {test['pl']}x{test['pp']}", "speed_pp"), (f"decode {test['pl']}", "speed_tg")):
            figures[name] = max(figures.get(name, 0.0), float(test[key]))
    if not figures:
        raise ValueError(f"no test in {text[-500:]!r}")
    return figures


def llama_instruction_set(text: str) -> str:
    """Names of the features that llama.cpp's "system_info" line has switched on, or "" without such a line."""
    for line in text.splitlines():
        _, found, features = line.partition("system_info:")
        if found:
            pairs = (part.strip().rpartition(" = ") for part in features.replace(":", "|").split("|"))
            return " ".join(name.strip() for name, _, value in pairs if value == "1" and name)
    return ""


def served(report: Mapping[str, Any], api: str, concurrency: int) -> dict[str, float]:
    """Figures of `quire bench serve --json`. Raises ValueError where a request failed."""
    if report["errors"]:
        raise ValueError(f"{report['errors']} of {report['requests']} requests failed: {report['error_kinds']}")
    names = {
        "ttft p50": report["ttft_ms"]["p50"],
        "ttft p99": report["ttft_ms"]["p99"],
        "gap p50": report["gap_ms"]["p50"],
        "gap p99": report["gap_ms"]["p99"],
        "output tok/s": report["output_tok_s"],
    }
    return {f"{api} {name} @{concurrency}": float(value) for name, value in names.items()}
