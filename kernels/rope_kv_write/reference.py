"""The same from the plain operations, in fp32."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.kv_write import kv_write
from kernels.rope import rotate_


def rope_kv_write_plainly(qkv: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, slots: Tensor, hot: Tensor) -> None:
    """As kernels.rope_kv_write.rope_kv_write, on any device."""
    kept = slots >= 0
    kv_heads, rotated = hot.shape[0] // 2, 2 * cos.shape[1]
    wide = qkv[kept].float()
    c, s = cos[positions[kept]], sin[positions[kept]]
    turned = wide[:, :-kv_heads, :rotated]
    rotate_(turned, torch.cat((c, c), -1).unsqueeze(1), torch.cat((-s, s), -1).unsqueeze(1))
    heads = qkv.shape[1] - hot.shape[0]
    qkv[kept, :heads] = wide[:, :heads].to(qkv.dtype)
    if hot.dtype == torch.float8_e4m3fn:  # few operations know it
        codes = wide[:, heads:].clamp(-448, 448).to(hot.dtype)
        kv_write(hot.view(torch.uint8), codes.view(torch.uint8), slots[kept])
    else:
        kv_write(hot, wide[:, heads:], slots[kept])
