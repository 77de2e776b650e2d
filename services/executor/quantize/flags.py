"""What the commands share that make a smaller model of one and of some text: flags, and how they end."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from services.common import log as logs
from services.common.errors import QuireError, Reason
from services.executor.models.source import resolve
from services.executor.quantize.choice import CalibrationSize, Source
from services.executor.text_file import read_text


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """The model, and the folder that is made."""
    parser.add_argument("model", metavar="MODEL", help="folder, .gguf file, hub id or catalogue entry")
    parser.add_argument("--out", required=True, metavar="DIR", help="an empty or new folder, or an unfinished one")


def add_text_flags(parser: argparse.ArgumentParser) -> None:
    """Those of the calibration text, of the threads that compute with it, and of what is told in the end."""
    parser.add_argument(
        "--calibration", metavar="FILE", help="text, UTF-8 (default: what the model writes itself, which takes a while)"
    )
    parser.add_argument("--samples", type=_at_least(1), default=128, metavar="N", help="of the text (default: 128)")
    parser.add_argument("--context", type=_at_least(1), default=512, metavar="N", help="tokens a sample (default: 512)")
    parser.add_argument(
        "--threads", type=_at_least(0), default=0, metavar="N", help="compute threads; 0 leaves it to torch"
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON instead of a table")


def source_of(options: argparse.Namespace) -> Source:
    """What the flags name. Raises INVALID_FIELD and MODEL_LOAD_FAILED."""
    return Source(
        name=options.model,
        path=resolve(options.model),
        text=None if options.calibration is None else read_text("--calibration", options.calibration),
        size=CalibrationSize(options.samples, options.context),
        threads=options.threads,
    )


def run_command(name: str, make: Callable[[], str]) -> int:
    """Prints what `make` tells of what it made, or its QuireError in one line.

    Exit status: 0 done, 1 where the model cannot be loaded or computed, 2 for a wrong flag or text.
    """
    logs.configure(name, "warning", "text")
    try:
        told = make()
    except QuireError as error:
        print(f"quire {name}: {error}", file=sys.stderr)
        return 2 if error.reason is Reason.INVALID_FIELD else 1
    print(told, flush=True)
    return 0


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{text} is less than {least}")
        return value

    return number
