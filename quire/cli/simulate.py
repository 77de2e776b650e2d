"""`quire simulate`: a load over this software's own decisions, without a model: the whole stack, its cache
alone, or the stack under faults."""

from __future__ import annotations

from collections.abc import Sequence

from quire.cli import simulate_cache, simulate_faults, simulate_load


def run(argv: Sequence[str]) -> int:
    """Exit status: 0 done, 1 for what cannot be read, drawn or served, 2 for wrong use."""
    if "--faults" in argv:
        return simulate_faults.run(argv)
    return simulate_cache.run(argv) if "--cache-only" in argv else simulate_load.run(argv)
