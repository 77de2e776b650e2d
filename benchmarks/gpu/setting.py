"""Where a check runs, and how large: on a card at real sizes, or tiny and interpreted, to prove the check itself."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.gpu.measure import Clock, CudaClock, OnceClock
from benchmarks.gpu.models import LLAMA_8B, SMOLLM2, TINY
from kernels.gpu.device import gpu_of
from services.executor.backends.cuda.device import CudaDevice, Device, InterpretedDevice
from services.executor.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Setting:
    """Sizes of all parts."""

    device: Device
    clock: Clock
    dtypes: tuple[torch.dtype, ...]  # to verify
    dtype: str  # of models and timings
    large: ModelSpec
    small: ModelSpec
    batch: int  # of the large model
    context: int
    steps: int  # of a model that is timed
    scale: int  # real sizes are divided by it

    @property
    def place(self) -> torch.device:
        return self.device.torch_device

    @property
    def torch_dtype(self) -> torch.dtype:
        return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[self.dtype]

    @property
    def has_fp8(self) -> bool:
        """Whether e4m3 is multiplied as it is."""
        return gpu_of(self.place).has_fp8

    def sized(self, size: int, least: int = 1) -> int:
        """A real size, or a tiny one in its place."""
        return max(size // self.scale, least)


def on_card() -> Setting:
    """The first CUDA device. RuntimeError where there is none."""
    if not torch.cuda.is_available():
        raise RuntimeError("there is no CUDA device; --dry proves the check itself on a CPU")
    device = CudaDevice()
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    clock = CudaClock(device.torch_device)
    return Setting(device, clock, dtypes, "bf16", LLAMA_8B, SMOLLM2, 64, 1024, 64, 1)


def dry() -> Setting:
    """Everything tiny, on a CPU under Triton's interpreter."""
    return Setting(InterpretedDevice(), OnceClock(), (torch.float32,), "fp32", TINY, TINY, 2, 6, 1, 1 << 30)
