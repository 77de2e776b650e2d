"""NaN and infinity are found where they come in or come about, so that no file that is written holds them."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.common.errors import QuireError, Reason
from services.executor.models.dequantize import to_float32
from services.executor.models.weights import Checkpoint, load_failed


def read_tensor(checkpoint: Checkpoint, name: str) -> Tensor:
    """The whole tensor as fp32. Raises MODEL_LOAD_FAILED where a number is not finite."""
    values = to_float32(checkpoint.tensor(name))
    check_read(name, values)
    return torch.from_numpy(values)


def check_read(name: str, values: NDArray[np.float32]) -> None:
    """MODEL_LOAD_FAILED where some numbers of the source's tensor are not finite."""
    if not np.isfinite(values).all():
        raise load_failed(f"tensor {name} holds NaN or infinity")


def check_computed(what: str, values: Tensor) -> None:
    """NOT_FINITE, saying of what, where some numbers are not finite."""
    if not bool(values.isfinite().all()):
        raise QuireError(Reason.NOT_FINITE, f"{what}: not all numbers are finite")
