"""`quire prune`: makes a smaller model of one."""

from __future__ import annotations

from collections.abc import Sequence

from quire.cli.needs_torch import run_with_torch


def run(argv: Sequence[str]) -> int:
    return run_with_torch("prune", "services.executor.prune.command", argv)
