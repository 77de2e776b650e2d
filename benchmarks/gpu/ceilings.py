"""What the card can do at most: copied bytes and multiplied numbers, measured before all else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from benchmarks.gpu.report import Row
from benchmarks.gpu.setting import Setting


@dataclass(slots=True)
class Ceilings:
    """Measured once; what is timed later is compared with them."""

    bytes_per_second: float = 1.0  # read and written together
    flops: float = 1.0

    def measure(self, setting: Setting) -> Iterator[Row]:
        size = setting.sized(1 << 30, 1 << 16)
        source = torch.zeros(size, dtype=torch.uint8, device=setting.place)
        target = torch.empty_like(source)
        self.bytes_per_second = 2 * size / setting.clock.seconds(lambda: target.copy_(source))
        yield Row("copy bandwidth", self.bytes_per_second / 1e9, "GB/s")
        side = setting.sized(8192, 64)
        left = torch.randn(side, side, device=setting.place).to(setting.torch_dtype)
        self.flops = 2 * side**3 / setting.clock.seconds(lambda: left @ left)
        yield Row(f"{setting.dtype} products", self.flops / 1e12, "TFLOP/s")
