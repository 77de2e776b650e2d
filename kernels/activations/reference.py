"""Rounds activations in plain PyTorch, bit for bit as the kernels do."""

from __future__ import annotations

import torch
from torch import Tensor


def quantize_plainly(x: Tensor, kind: str, group: int = 0) -> tuple[Tensor, Tensor]:
    """Codes [T, K] (int8 or e4m3) and scales ([T], or [T, ceil(K / group)]) of fp32 x [T, K]."""
    rows, columns = x.shape
    size = group or columns
    padded = torch.nn.functional.pad(x, (0, -columns % size)).view(rows, -1, size)
    most = 127.0 if kind == "int8" else 448.0
    reach = padded.abs().amax(2)
    inverse = torch.where(reach > 0, most / reach, torch.zeros(()))
    scaled = (padded * inverse[..., None]).clamp(-most, most).view(rows, -1)[:, :columns]
    codes = scaled.round().to(torch.int8) if kind == "int8" else scaled.to(torch.float8_e4m3fn)
    scales = reach / torch.full_like(reach, most)
    return codes, scales if group else scales[:, 0]
