"""Kernels run on the GPU where there is one, else under Triton's interpreter.

Under the interpreter products of bf16 are wrong, so bf16 is tested on GPUs only.
"""

from __future__ import annotations

import pytest
import torch

from tests.triton_device import DEVICE


@pytest.fixture
def device() -> torch.device:
    return DEVICE
