"""Norm, gate, rotation and rounding."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernels.activations import ActivationFormat, quantize
from kernels.rms_norm import add_rms_norm
from kernels.rope_kv_write import rope_kv_write
from kernels.silu_mul import ACTIVATIONS, gate_mul

FORMATS = (None, ActivationFormat("int8"), ActivationFormat("fp8"), ActivationFormat("fp8", 128))


def cases() -> dict[str, Callable[[], object]]:
    x = torch.zeros(2, 4096, dtype=torch.bfloat16)
    found: dict[str, Callable[[], object]] = {
        "rope and write": lambda: rope(torch.bfloat16, 128),
        "rope and write e4m3": lambda: rope(torch.float8_e4m3fn, 64),
    }
    for format_ in FORMATS:
        name = f"{format_.kind} {format_.group}" if format_ else "unrounded"
        found[f"norm, {name}"] = lambda f=format_: add_rms_norm(x, x.clone(), x[0].clone(), 1e-5, f)  # type: ignore[misc]
        for activation in ACTIVATIONS:
            found[f"{activation}, {name}"] = lambda a=activation, f=format_: gate_mul(x, a, f)  # type: ignore[misc]
        if format_:
            found[f"quantize, {name}"] = lambda f=format_: quantize(x, f)  # type: ignore[misc]
    return found


def rope(hot: torch.dtype, turned: int) -> None:
    cos = torch.zeros(8, turned // 2)
    at = torch.zeros(2, dtype=torch.int64)
    rope_kv_write(torch.zeros(2, 24, 128, dtype=torch.bfloat16), cos, cos, at, at, torch.zeros(8, 2, 16, 128).to(hot))
