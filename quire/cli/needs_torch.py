"""Commands that need torch, which only they and the executor may import."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence


def run_with_torch(command: str, module: str, argv: Sequence[str]) -> int:
    """Runs a module's `main(argv) -> int`; 1 where there is no torch."""
    if importlib.util.find_spec("torch") is None:
        print(
            f"quire {command}: needs PyTorch, which is not installed (pip install 'quire-llm[torch]')", file=sys.stderr
        )
        return 1
    from services.executor.openmp import yield_soon

    yield_soon()  # before torch is imported
    status: int = importlib.import_module(module).main(argv)
    return status
