"""`quire prune`: a smaller model of the same vocabulary."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from services.common.errors import invalid
from services.common.flags import FlagParser
from services.executor.prune.target import Target
from services.executor.quantize.flags import add_model_flags, add_text_flags, run_command, source_of
from services.executor.quantize.progress import progress_bar

if TYPE_CHECKING:
    from services.executor.prune.run import Report

DESCRIPTION = """Makes a smaller model of the same vocabulary: a folder in Hugging Face's layout, all in 16 bits.

On some text it is measured what each layer, each channel of the MLPs and each head adds to the model's stream; what
adds least is taken out. Heads that share keys and values go together. With --distill-minutes, what is left then learns
for so long to say what the whole model says; that takes 16 bytes of memory for each weight that is left. A run that
was ended begins anew.

The smaller model can be served by itself, quantized (quire quantize), or compared (quire eval compare)."""

EXAMPLES = """examples:
  quire prune smollm2 --layers 24 --calibration book.txt --distill-minutes 10 --out smollm2-24
  quire prune ~/models/my-llama --mlp-width 4096 --heads 16 --calibration book.txt --out my-llama-narrow"""


def main(argv: Sequence[str]) -> int:
    """Exit status: 0 done, 1 where the model cannot be loaded or computed, 2 for a wrong flag or text."""
    options = _parser().parse_args(argv)
    return run_command("prune", lambda: _made(options))


def _made(options: argparse.Namespace) -> str:
    """Makes the model; what to tell of it."""
    from services.executor.prune.run import Request, prune_model  # not for --help: torch takes its time

    seconds, out = 60 * options.distill_minutes, Path(options.out)
    if not 0 <= seconds < float("inf"):
        raise invalid("--distill-minutes", f"{options.distill_minutes:g} is no time")
    target = Target(options.layers, options.mlp_width, options.heads)
    report = prune_model(Request(source_of(options), target, seconds), out, progress_bar)
    return json.dumps(_plain(report, options.model, out)) if options.json else _table(report, out)


def _parser() -> argparse.ArgumentParser:
    parser = FlagParser(prog="quire prune", description=DESCRIPTION, epilog=EXAMPLES)
    add_model_flags(parser)
    left = parser.add_argument_group("what is left (default: all of it)")
    left.add_argument("--layers", type=int, metavar="N", help="of the model")
    left.add_argument("--mlp-width", type=int, metavar="N", help="channels of each layer's MLP")
    left.add_argument(
        "--heads", type=int, metavar="N", help="of each layer's attention, that query; not all numbers fit a model"
    )
    parser.add_argument(
        "--distill-minutes", type=float, default=0.0, metavar="X", help="of learning from the whole model (default: 0)"
    )
    add_text_flags(parser)
    return parser


def _plain(report: Report, source: str, out: Path) -> dict[str, Any]:
    learned = report.learned
    return {
        "model": source,
        "out": str(out),
        "layers": list(report.layers),
        "mlp_width": report.spec.intermediate_size,
        "heads": report.spec.head_count,
        "kv_heads": report.spec.kv_head_count,
        "source_weights": report.source_weights,
        "weights": report.weights,
        "bytes": report.bytes,
        "samples": report.samples,
        "distillation": None
        if learned is None
        else {"steps": learned.steps, "kl_before": round(learned.before, 4), "kl_after": round(learned.after, 4)},
        "seconds": round(report.seconds, 2),
    }


def _table(report: Report, out: Path) -> str:
    whole, left = report.source_spec, report.spec
    gone = [str(index) for index in range(whole.layer_count) if index not in report.layers]
    without = f", without {', '.join(gone)}" if gone else ""
    lines = [
        str(out),
        f"layers                {left.layer_count:10} of {whole.layer_count}{without}",
        f"MLP channels          {left.intermediate_size:10} of {whole.intermediate_size} a layer",
        f"heads                 {left.head_count:10} of {whole.head_count} a layer, "
        f"for {left.kv_head_count} of {whole.kv_head_count} of keys and values",
        f"weights               {report.weights / 1e6:10,.1f} M of {report.source_weights / 1e6:,.1f} M, "
        f"{report.bytes / 1e6:,.1f} MB",
        f"calibration           {report.samples:10} samples",
    ]
    if report.learned is not None:
        lines.append(
            f"KL from the model     {report.learned.after:10.3f} nats per token on samples held back, "
            f"{report.learned.before:.3f} before {report.learned.steps} steps of distillation"
        )
    return "\n".join([*lines, f"time                  {report.seconds:10,.0f} s"])
