"""Where kernels run in tests: on the GPU where there is one, else under Triton's interpreter.

The interpreter has to be chosen before triton is imported: whoever runs kernels imports this first.
"""

from __future__ import annotations

import os
import sys

import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

if DEVICE.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
    if "triton" in sys.modules:
        raise pytest.UsageError("something imported triton before its interpreter was chosen")
    os.environ["TRITON_INTERPRET"] = "1"
