"""Facts of the GPU that a kernel is launched on; under Triton's interpreter, facts that choose what it can compute."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU."""

    name: str  # as the driver says, such as "NVIDIA H200"
    capability: int  # 80 for 8.0, 90 for 9.0
    processors: int  # streaming multiprocessors

    @property
    def has_fp8(self) -> bool:
        """Whether it converts and multiplies e4m3 itself."""
        return self.capability >= 89


INTERPRETER = Gpu("interpreter", 0, 2)


def gpu_of(device: torch.device) -> Gpu:
    """The GPU that kernels on tensors of this device run on. RuntimeError where there is none."""
    if device.type == "cuda":
        return _cuda(torch.cuda.current_device() if device.index is None else device.index)
    if triton.knobs.runtime.interpret:
        return INTERPRETER
    # Compiling ahead of time: tensors lie on the CPU, and the driver names a target.
    return Gpu("unknown", int(triton.runtime.driver.active.get_current_target().arch), 132)


@cache
def _cuda(index: int) -> Gpu:
    facts = torch.cuda.get_device_properties(index)
    return Gpu(facts.name, facts.major * 10 + facts.minor, facts.multi_processor_count)
