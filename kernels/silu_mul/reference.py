"""y = gate * sigmoid(gate) * up."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_SERIAL_VALUES = 32767  # torch splits larger elementwise loops over threads


def silu_mul(gate_up: Tensor) -> Tensor:
    """From gate_up [T, 2 * I], gate first, to [T, I]."""
    if gate_up.dim() != 2 or gate_up.shape[1] % 2:
        raise ValueError(f"silu_mul of {list(gate_up.shape)}")
    size = gate_up.shape[1] // 2
    if gate_up.device.type != "cpu":
        return F.silu(gate_up[:, :size]).mul_(gate_up[:, size:])
    # A thread's share may end inside a row, where torch computes exp in another way than in whole vectors; in pieces
    # below its splitting size a row's result does not depend on its neighbours or on the number of threads.
    out = torch.empty((gate_up.shape[0], size), dtype=gate_up.dtype)
    step = max(1, _SERIAL_VALUES // size)
    for start in range(0, gate_up.shape[0], step):
        rows, part = gate_up[start : start + step], out[start : start + step]
        torch.mul(F.silu(rows[:, :size]), rows[:, size:], out=part)
    return out
