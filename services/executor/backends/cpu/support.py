"""Whether the cpu backend can serve what an executor is asked for, decided before any weight is read."""

from __future__ import annotations

from collections.abc import Sequence

from services.executor.settings import ExecutorSettings

BLOCK_SIZE = 32
"""Token slots of a block: what the kernels are laid out for."""


def refusal(settings: ExecutorSettings, sets: Sequence[str]) -> str | None:
    """Why not, beginning with the setting at fault; None where it can. `sets`: what this CPU has, best last."""
    if settings.dtype == "fp16":
        return "dtype: fp16 is not supported, only fp32, bf16 and (auto) what a quantized file holds"
    if settings.block_size != BLOCK_SIZE:
        return f"block_size: {settings.block_size} is not supported, only {BLOCK_SIZE}"
    if settings.instruction_set not in ("auto", *sets):
        return f"instruction_set: this CPU has no {settings.instruction_set}, only {', '.join(sets)}"
    return None
