"""The gate of a gated MLP."""

from __future__ import annotations

from torch import Tensor

from kernels.activations import ActivationFormat, Quantized, empty_quantized
from kernels.silu_mul.reference import silu_mul

__all__ = ["ACTIVATIONS", "gate_mul", "silu_mul"]

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


def gate_mul(gate_up: Tensor, activation: str = "silu", format_: ActivationFormat | None = None) -> Tensor | Quantized:
    """From gate_up [T, 2 * I], gate first, to activation(gate) * up [T, I], on a GPU.

    Computes in fp32; the result has gate_up's type, or is rounded to `format_`.
    """
    if gate_up.dim() != 2 or gate_up.shape[1] % 2 or gate_up.stride(1) != 1:
        raise ValueError(f"gate_mul of {list(gate_up.shape)}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"gate_mul with {activation}; there are {', '.join(ACTIVATIONS)}")
    rows, columns = gate_up.shape[0], gate_up.shape[1] // 2
    out: Tensor | Quantized
    if format_ is None:
        out = gate_up.new_empty((rows, columns))
    else:
        out = empty_quantized(rows, columns, format_, gate_up.device)
    from kernels.silu_mul import triton_impl

    triton_impl.gate_mul(gate_up, activation, out, format_)
    return out
