"""How long work takes is shown while it is done."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from tqdm import tqdm

Bar = Callable[[str, int, int, str], AbstractContextManager[Callable[[int], object]]]
"""A progress bar: what is done, how much of it is done and in all, the unit; gives what hears of more."""


@contextmanager
def progress_bar(what: str, done: int, total: int, unit: str) -> Iterator[Callable[[int], object]]:
    """On standard error, where that is a terminal; shows the time left."""
    with tqdm(desc=what, initial=done, total=total, unit=unit, file=sys.stderr, disable=None) as bar:
        yield bar.update
