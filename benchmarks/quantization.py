"""What each way to quantize a model costs: time and memory to make it, and size, quality and speed of what was made.

    python -m benchmarks.quantization --text wiki.test.txt --work quantized

The reference is the model off its own grid (`benchmarks.off_grid`). The last quarter of the text calibrates, the rest
is scored. What an earlier run made in --work is kept; --also compares checkpoints that other programs made of
`reference` with `calibration.txt`, both in that folder. Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GROUP_SIZE = 64
SIGNS = {"sym": "--symmetric", "asym": "--asymmetric"}


@dataclass(frozen=True, slots=True)
class Recipe:
    """A way to quantize; the flags are those of `quire quantize`."""

    name: str
    flags: tuple[str, ...]


def recipes() -> Iterator[Recipe]:
    """All that are measured."""
    for bits in (4, 3):
        for sign, flag in SIGNS.items():
            for method in ("rtn", "gptq", "awq"):
                flags = ("--method", method, "--bits", str(bits), "--group-size", str(GROUP_SIZE), flag)
                yield Recipe(f"{method}-{bits}-{sign}", flags)
    grid = ("--method", "gptq", "--bits", "4", "--group-size", str(GROUP_SIZE), "--symmetric")
    yield Recipe("gptq-4-sym-ordered", (*grid, "--act-order"))
    yield Recipe("w8a8", ("--method", "smoothquant"))
    yield Recipe("fp8", ("--method", "fp8"))
    yield Recipe("gptq-fp8", ("--method", "gptq-fp8"))


def main() -> int:
    options = _parser().parse_args()
    from benchmarks.off_grid import make_reference

    work = options.work
    work.mkdir(parents=True, exist_ok=True)
    # In a process of its own: what this one ever held would count for those that it starts.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as apart:
        reference = apart.submit(make_reference, options.model, work / "reference").result()
    scored, calibration = split_text(options.text, work)
    chosen = [recipe for recipe in recipes() if not options.only or recipe.name in options.only]
    costs = {recipe.name: make(recipe, reference, calibration, options.samples, work) for recipe in chosen}
    report = compare([reference, *(work / recipe.name for recipe in chosen), *options.also], scored, options)
    (work / "compared.json").write_text(json.dumps(report | {"made": costs}, indent=1))
    print(markdown(report, costs))
    print()
    print("\n".join(claims(report)))
    return 0


def split_text(text: Path, work: Path) -> tuple[Path, Path]:
    """The part that is scored and the part that calibrates, as files."""
    lines = text.read_text(encoding="utf-8").splitlines(keepends=True)
    at = len(lines) * 3 // 4
    parts = {"scored.txt": lines[:at], "calibration.txt": lines[at:]}
    for name, part in parts.items():
        (work / name).write_text("".join(part), encoding="utf-8")
    return work / "scored.txt", work / "calibration.txt"


def make(recipe: Recipe, reference: Path, calibration: Path, samples: int, work: Path) -> dict[str, Any]:
    """Quantizes, unless an earlier run did; seconds, the largest resident memory, and what the command tells."""
    kept = work / f"{recipe.name}.json"
    if kept.is_file():
        found: dict[str, Any] = json.loads(kept.read_text())
        return found
    print(f"making {recipe.name}", file=sys.stderr)
    command = ["quantize", str(reference), *recipe.flags, "--calibration", str(calibration)]
    command += ["--samples", str(samples), "--out", str(work / recipe.name), "--json"]
    report, peak = _quire(command)
    report["peak_bytes"] = peak
    kept.write_text(json.dumps(report))
    return report


def compare(models: Sequence[Path], text: Path, options: argparse.Namespace) -> dict[str, Any]:
    """What `quire eval compare` finds."""
    command = ["eval", "compare", *map(str, models), "--text", str(text), "--backend", options.backend]
    command += ["--context", str(options.context), "--stride", str(options.context), "--json"]
    command += ["--at-once", str(options.at_once)]
    command += ["--tokens", str(options.tokens)] if options.tokens else []
    command += ["--plot", str(options.plot)] if options.plot else []
    return _quire(command)[0]


def markdown(report: Mapping[str, Any], costs: Mapping[str, Mapping[str, Any]]) -> str:
    """The table of docs/quantization.md."""
    rows = [
        "| model | bits/weight | MB | perplexity | KL | top-1 | prefill tok/s | decode tok/s | made in | peak |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for model in report["models"]:
        cost = costs.get(model["model"])
        low, high = model["perplexity_interval"] or (model["perplexity"], model["perplexity"])
        cells = [
            model["model"],
            f"{model['bits_per_weight']:.2f}",
            f"{model['bytes'] / 1e6:.1f}",
            f"{model['perplexity']:.3f} ({low:.2f} to {high:.2f})",
            "" if model["kl_mean"] is None else f"{model['kl_mean']:.2e}",
            "" if model["top1_agreement"] is None else f"{model['top1_agreement']:.2%}",
            f"{model['prefill_tok_s']:.0f}",
            f"{model['decode_tok_s']:.1f}",
            "" if cost is None else f"{cost['seconds']:.0f} s",
            "" if cost is None else f"{cost['peak_bytes'] / 1e9:.2f} GB",
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def claims(report: Mapping[str, Any]) -> Iterator[str]:
    """Each method against rounding to nearest on the same grid, and how much of its loss remains."""
    nll = {model["model"]: model["nll"] for model in report["models"]}
    plain = report["models"][0]["nll"]
    pairs = {(pair["better"], pair["worse"]): pair for pair in report["differences"]}
    for name in nll:
        method, _, grid = name.partition("-")
        rounded = f"rtn-{grid}"
        if method not in ("gptq", "awq") or rounded not in nll:
            continue
        pair = pairs.get((name, rounded))
        if pair is None:
            yield f"{name} is no better than {rounded}"
            continue
        left = (nll[name] - plain) / (nll[rounded] - plain)
        interval = "one window" if pair["interval"] is None else "{:.4f} to {:.4f}".format(*pair["interval"])
        doubt = "" if pair["is_certain"] else ", which may be chance"
        yield (
            f"{name} beats {rounded} by {pair['nats_per_token']:.4f} nats per token ({interval}){doubt}; "
            f"{left:.0%} of the loss remain"
        )


def _quire(command: Sequence[str]) -> tuple[dict[str, Any], int]:
    """The JSON that a command of Quire prints, and the largest resident memory of its process in bytes."""
    process = subprocess.Popen([sys.executable, "-m", "quire.cli", *command], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        printed = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"quire {' '.join(command)} failed with status {process.returncode}")
    return json.loads(printed.splitlines()[-1]), usage.ru_maxrss * 1024


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="what the reference is made of (default: smollm2)")
    parser.add_argument("--text", type=Path, required=True, help="a text, UTF-8")
    parser.add_argument("--work", type=Path, required=True, help="a folder for the models")
    parser.add_argument("--only", type=lambda text: text.split(","), help="some recipes, by name, with commas")
    parser.add_argument("--also", type=Path, nargs="*", default=[], help="checkpoints of other programs")
    parser.add_argument("--samples", type=int, default=128, help="of calibration (default: 128)")
    parser.add_argument("--context", type=int, default=2048, help="tokens per window (default: 2048)")
    parser.add_argument("--tokens", type=int, help="only the first N tokens are scored")
    parser.add_argument("--at-once", type=int, default=4, help="models in memory when they are compared (default: 4)")
    parser.add_argument("--backend", default="auto", help="what computes (default: auto)")
    parser.add_argument("--plot", type=Path, help="draw the comparison")
    return parser


if __name__ == "__main__":
    sys.exit(main())
