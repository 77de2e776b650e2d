"""The stored tensors that make up one quantized matrix, as safetensors files hold them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.common.errors import QuireError
from services.executor.models.weights import Bytes, Shape, load_failed
from services.executor.quant.matrix import Float32

TYPES: Mapping[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),  # numpy has no bf16: its bits
    "F8_E4M3": np.dtype("u1"),  # nor this
    "I8": np.dtype("i1"),
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
}
FLOATS = ("F16", "BF16", "F32")


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor."""

    format: str  # as safetensors names it
    shape: Shape
    data: Bytes  # flat; usually mapped memory

    @classmethod
    def of(cls, format_: str, values: NDArray[Any]) -> Part:
        """Numbers, or for BF16 and F8_E4M3 their bits, as a tensor of that format."""
        array = np.ascontiguousarray(values, TYPES[format_])
        return cls(format_, values.shape, array.reshape(-1).view(np.uint8))

    @classmethod
    def of_floats(cls, format_: str, values: Float32) -> Part:
        """ValueError where a number is not exact in the format."""
        if format_ == "BF16":
            part = cls.of(format_, values.view(np.uint32) >> np.uint32(16))
        else:
            with np.errstate(over="ignore"):
                part = cls.of(format_, values.astype(TYPES[format_]))
        if not np.array_equal(part.floats(), values):
            raise ValueError(f"numbers that are not exact in {format_}")
        return part

    def array(self) -> NDArray[Any]:
        """The numbers; of BF16 and F8_E4M3 the bits."""
        return self.data.view(TYPES[self.format]).reshape(self.shape)

    def floats(self, *window: slice) -> Float32:
        """A part of the numbers as fp32."""
        values = self.array()[window]
        if self.format == "BF16":
            return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return values.astype(np.float32)


@dataclass(frozen=True, slots=True)
class StoredLayer:
    """A matrix [N, K] of the model and what the file has of it."""

    name: str  # canonical, for messages
    module: str  # as the file names it: model.layers.0.mlp.up_proj
    shape: tuple[int, int]  # that the model needs
    parts: Mapping[str, Part]

    def part(self, name: str, formats: tuple[str, ...], *shapes: Shape) -> Part:
        """A part in one of these formats and shapes. MODEL_LOAD_FAILED where it is missing or differs."""
        part = self.parts.get(name)
        if part is None:
            raise self.refused(f"{name} is missing; there are {', '.join(sorted(self.parts))}")
        if part.format not in formats or part.shape not in shapes:
            expected = " or ".join(str(list(shape)) for shape in shapes)
            raise self.refused(
                f"{name} is {part.format} {list(part.shape)}, expected {' or '.join(formats)} {expected}"
            )
        return part

    def check_parts(self, known: frozenset[str]) -> None:
        """MODEL_LOAD_FAILED naming a part that the scheme does not know."""
        others = sorted(self.parts.keys() - known)
        if others:
            raise self.refused(f"{others[0]} is no part of it; there are {', '.join(sorted(self.parts))}")

    def refused(self, why: str) -> QuireError:
        rows, columns = self.shape
        return load_failed(f"tensor {self.name} [{rows}, {columns}]: {why}")
