"""`quire prune`: makes a smaller model of one. Needs torch, which only it and the executor may import."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence


def run(argv: Sequence[str]) -> int:
    if importlib.util.find_spec("torch") is None:
        print("quire prune: needs PyTorch, which is not installed (pip install 'quire-llm[torch]')", file=sys.stderr)
        return 1
    from services.executor.openmp import yield_soon

    yield_soon()  # before torch is imported
    from services.executor.prune.command import main

    return main(argv)
