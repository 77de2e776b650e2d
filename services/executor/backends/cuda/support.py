"""Whether the cuda backend can serve what an executor is asked for, decided before any weight is read."""

from __future__ import annotations

import importlib.util

from services.executor.settings import ExecutorSettings

MOST_QUERIES = 8
"""Tokens of one sequence in a captured step where drafts are proposed: a token and seven drafts."""


def refusal(settings: ExecutorSettings) -> str | None:
    """Why not, beginning with what is missing or the setting at fault; None where it can.

    Imports torch and triton.
    """
    for package, extra in (("torch", "torch"), ("triton", "cuda")):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed (pip install 'quire-llm[{extra}]')"
    if settings.instruction_set != "auto":
        return "instruction_set: a GPU has none to choose from"
    from services.executor.backends.cuda.device import find_device

    device = find_device()
    if device is None:
        return (
            "torch finds no CUDA device; without one, TRITON_INTERPRET=1 in the environment runs the kernels on the"
            " CPU, slowly, for tests"
        )
    for name in ("dtype", "kv_format"):
        if getattr(settings, name) == "bf16" and not device.multiplies_bf16:
            return f"{name}: {device.name} cannot multiply bf16, only fp32 and fp16"
    return None
