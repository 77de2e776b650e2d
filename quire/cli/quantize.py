"""`quire quantize`: makes a quantized checkpoint of a model."""

from __future__ import annotations

from collections.abc import Sequence

from quire.cli.needs_torch import run_with_torch


def run(argv: Sequence[str]) -> int:
    return run_with_torch("quantize", "services.executor.quantize.command", argv)
