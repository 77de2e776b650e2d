"""Flags and progress bars of the commands that make a smaller model of one and of some text."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm


def add_text_flags(parser: argparse.ArgumentParser) -> None:
    """Those of the calibration text and of the threads that compute with it."""
    parser.add_argument(
        "--calibration", metavar="FILE", help="text, UTF-8 (default: what the model writes itself, which takes a while)"
    )
    parser.add_argument("--samples", type=_positive, default=128, metavar="N", help="of the text (default: 128)")
    parser.add_argument("--context", type=_positive, default=512, metavar="N", help="tokens a sample (default: 512)")
    parser.add_argument("--threads", type=int, default=0, metavar="N", help="compute threads; 0 leaves it to torch")


@contextmanager
def progress_bar(what: str, done: int, total: int, unit: str) -> Iterator[Callable[[int], object]]:
    """On standard error, where that is a terminal; shows the time left."""
    with tqdm(desc=what, initial=done, total=total, unit=unit, file=sys.stderr, disable=None) as bar:
        yield bar.update


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return value
