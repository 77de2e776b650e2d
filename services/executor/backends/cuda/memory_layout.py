"""Several arrays in one piece of memory, so that one copy brings them to the device."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.executor.backends.cuda.device import Device, Mark

_ALIGNED = 16
_TORCH = {np.dtype(getattr(np, name)): getattr(torch, name)
          for name in ("int32", "int64", "float32", "float64")}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Field:
    """One array."""

    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Shared:
    """Arrays by name, in host memory (numpy) and on the device (torch), each one piece."""

    def __init__(self, device: Device, fields: Mapping[str, Field]) -> None:
        """Zeros on both sides."""
        offsets, size = {}, 0
        for name, field in fields.items():
            offsets[name] = size
            size += -(-field.nbytes // _ALIGNED) * _ALIGNED
        self._device = device
        self._host_bytes = device.host_memory((max(size, _ALIGNED),), torch.uint8)
        self._device_bytes = torch.zeros(max(size, _ALIGNED), dtype=torch.uint8, device=device.torch_device)
        whole = self._host_bytes.numpy()
        self._host: dict[str, NDArray[np.generic]] = {}
        self._sent: Mark | None = None
        self.device: dict[str, Tensor] = {}
        for name, field in fields.items():
            span = slice(offsets[name], offsets[name] + field.nbytes)
            self._host[name] = whole[span].view(field.dtype).reshape(field.shape)
            self.device[name] = self._device_bytes[span].view(_TORCH[field.dtype]).view(field.shape)

    def edit(self) -> dict[str, NDArray[np.generic]]:
        """The host's arrays, which the last `send` has read by then."""
        if self._sent is not None:
            self._sent.wait()
            self._sent = None
        return self._host

    def send(self) -> None:
        """Brings the host's side to the device."""
        self._device.send(self._host_bytes, self._device_bytes)
        self._sent = self._device.mark()


def send(device: Device, arrays: Mapping[str, NDArray[np.generic]]) -> dict[str, Tensor]:
    """Arrays (int32, int64, fp32, fp64) on the device."""
    shared = Shared(device, {name: Field(array.shape, array.dtype) for name, array in arrays.items()})
    host = shared.edit()
    for name, array in arrays.items():
        host[name][...] = array
    shared.send()
    return shared.device
