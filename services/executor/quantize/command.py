"""`quire quantize`: a smaller checkpoint of a model, which other programs load too."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from services.common.errors import invalid
from services.common.flags import FlagParser
from services.executor.quantize.choice import MIXED_BITS, Choice, MethodName, ScaleShape
from services.executor.quantize.flags import add_model_flags, add_text_flags, run_command, source_of
from services.executor.quantize.progress import progress_bar

if TYPE_CHECKING:
    from services.executor.quantize.run import Report

DESCRIPTION = """Makes a quantized checkpoint: a folder in Hugging Face's layout.

The matrices of all layers are quantized. The embedding and the head are written in 16 bits: fp16 where the source's
embedding is, else bf16. Layers are read, quantized and written one after the other, so the memory needed is that of
one layer and of the calibration text's activations. A run that was ended goes on where it was when it is started again
with the same flags.

With --auto, gptq measures what fewer bits of each layer would cost the model, and spends them where that is most.

  rtn          each weight to its nearest number; needs no text
  gptq         later columns make up for the error of those before (GPTQ format)
  awq          weights that large inputs meet are rounded more finely (AWQ format; of other than 4 bits, GPTQ format)
  smoothquant  int8 weights and inputs, whose outliers weights have taken over (compressed-tensors)
  fp8          e4m3 weights and inputs; needs no text (compressed-tensors)
  gptq-fp8     fp8's numbers, where later columns make up for the error of those before (compressed-tensors)"""

EXAMPLES = """examples:
  quire quantize smollm2 --method gptq --calibration book.txt --out smollm2-gptq
  quire quantize ~/models/my-llama --method awq --bits 4 --group-size 64 --calibration book.txt --out my-llama-awq
  quire quantize ~/models/my-llama --method gptq --bits 3 --act-order --out my-llama-gptq3   # on text of its own
  quire quantize ~/models/my-llama --auto --bits-per-weight 4.5 --calibration book.txt --out my-llama-mixed
  quire quantize ~/models/my-llama --method fp8 --scales block --out my-llama-fp8"""


DEFAULT_BITS_PER_WEIGHT = 4.5


def main(argv: Sequence[str]) -> int:
    """Exit status: 0 done, 1 where the model cannot be loaded or computed, 2 for a wrong flag or text."""
    options = _parser().parse_args(argv)
    return run_command("quantize", lambda: _made(options))


def _made(options: argparse.Namespace) -> str:
    """Makes the checkpoint; what to tell of it."""
    from services.executor.quantize.run import Request, quantize_model  # not for --help: torch takes its time

    choice = Choice(
        options.method,
        options.bits,
        options.group_size,
        options.symmetric,
        options.act_order,
        options.scales,
        _bits_per_weight(options),
        options.auto_bits,
    )
    out = Path(options.out)
    report = quantize_model(Request(source_of(options), choice), out, progress_bar)
    return json.dumps(_plain(report, options.model, out)) if options.json else _table(report, out)


def _parser() -> argparse.ArgumentParser:
    parser = FlagParser(prog="quire quantize", description=DESCRIPTION, epilog=EXAMPLES)
    add_model_flags(parser)
    parser.add_argument("--method", choices=get_args(MethodName), default="gptq", help="(default: gptq)")
    parser.add_argument("--bits", type=int, choices=(2, 3, 4, 8), help="per weight (default: 4)")
    parser.add_argument("--auto", action="store_true", help="gptq finds bits and groups for each layer by itself")
    parser.add_argument(
        "--bits-per-weight",
        type=float,
        metavar="X",
        help=f"of layers' matrices, on average and with scales, for --auto (default: {DEFAULT_BITS_PER_WEIGHT})",
    )
    parser.add_argument(
        "--auto-bits",
        type=_several,
        metavar="N,...",
        help=f"that --auto may choose (default: {','.join(map(str, MIXED_BITS))}; vLLM's fastest kernels take 4,8)",
    )
    parser.add_argument(
        "--group-size",
        type=int,
        choices=(32, 64, 128, -1),
        help="columns that share a scale, -1 for all (default: the largest that divides all widths)",
    )
    signs = parser.add_mutually_exclusive_group()
    signs.add_argument("--symmetric", action="store_true", default=None, help="around zero (default: but for awq)")
    signs.add_argument("--asymmetric", dest="symmetric", action="store_false", help="with a zero point per group")
    parser.add_argument("--act-order", action="store_true", help="gptq takes columns of large inputs first")
    parser.add_argument(
        "--scales", choices=get_args(ScaleShape), help="what shares a scale in fp8 (default: channel; block: 128x128)"
    )
    add_text_flags(parser)
    return parser


def _several(text: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(int(one) for one in text.split(",")))


def _bits_per_weight(options: argparse.Namespace) -> float | None:
    asked: float | None = options.bits_per_weight
    if options.auto:
        return DEFAULT_BITS_PER_WEIGHT if asked is None else asked
    if asked is not None:
        raise invalid("--bits-per-weight", "it is for --auto")
    return None


def _plain(report: Report, source: str, out: Path) -> dict[str, Any]:
    return {
        "model": source,
        "out": str(out),
        "quantization": str(report.recipe),
        "source_bytes": report.source_bytes,
        "bytes": report.bytes,
        "matrix_bits": round(report.matrix_bits, 4),
        "samples": report.samples,
        "seconds": round(report.seconds, 2),
        **({"layers": report.recipe.by_layer()} if report.recipe.is_mixed else {}),
    }


def _table(report: Report, out: Path) -> str:
    lines = [
        f"{out}: {report.recipe}",
        f"weights               {report.bytes / 1e6:10,.1f} MB, from files of {report.source_bytes / 1e6:,.1f} MB",
        f"matrices of layers    {report.matrix_bits:10.3f} bits per weight, with scales",
        f"calibration           {report.samples:10} samples" if report.samples else "calibration                 none",
        f"time                  {report.seconds:10,.0f} s",
    ]
    if report.recipe.is_mixed:
        layers = report.recipe.by_layer()
        lines += ["", f"bits, columns a scale   {''.join(f'{group:<10}' for group in layers[0])}".rstrip()]
        for index, groups in enumerate(layers):
            cells = [
                f"{own['bits']}, {'all' if own['group_size'] == -1 else own['group_size']}" for own in groups.values()
            ]
            lines.append(f"layer {index:<18}{''.join(f'{cell:<10}' for cell in cells)}".rstrip())
    return "\n".join(lines)
