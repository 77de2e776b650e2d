"""Matrices on the device, in the formats that kernels multiply."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.activations import ActivationFormat, Quantized, quantize
from kernels.quant_matmul import (
    Fp8Weight,
    Int4Weight,
    Int8Weight,
    multiply_fp8,
    multiply_int4,
    multiply_int8,
    multiply_plain,
)

INT8 = ActivationFormat("int8")


class Matrix(Protocol):
    """Maps activations [T, K] to [T, N]."""

    @property
    def takes(self) -> ActivationFormat | None:
        """How activations are to be rounded; None: they come as they are."""
        ...

    @property
    def nbytes(self) -> int: ...

    def __call__(self, x: Tensor | Quantized) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class PlainMatrix:
    """Numbers of the activations' type. Without `fixed_split` the vendor's library multiplies."""

    weight: Tensor  # [N, K]
    bias: Tensor | None = None
    fixed_split: int | None = None
    takes: ActivationFormat | None = field(default=None, init=False)

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def __call__(self, x: Tensor | Quantized) -> Tensor:
        assert isinstance(x, torch.Tensor)
        if self.fixed_split is None:
            return F.linear(x, self.weight, self.bias)
        return multiply_plain(x, self.weight, self.bias, fixed_split=self.fixed_split)


@dataclass(frozen=True, slots=True)
class Int4Matrix:
    """4-bit codes, which become numbers of the activations' type on the way."""

    weight: Int4Weight
    bias: Tensor | None = None
    fixed_split: int | None = None
    takes: ActivationFormat | None = field(default=None, init=False)

    @property
    def nbytes(self) -> int:
        offsets = self.weight.offsets
        return self.weight.codes.nbytes + self.weight.scales.nbytes + (0 if offsets is None else offsets.nbytes)

    def __call__(self, x: Tensor | Quantized) -> Tensor:
        assert isinstance(x, torch.Tensor)
        return multiply_int4(x, self.weight, self.bias, fixed_split=self.fixed_split)


@dataclass(frozen=True, slots=True)
class Int8Matrix:
    """int8 by int8."""

    weight: Int8Weight
    dtype: torch.dtype  # of the result
    bias: Tensor | None = None
    fixed_split: int | None = None
    takes: ActivationFormat | None = field(default=INT8, init=False)

    @property
    def nbytes(self) -> int:
        return self.weight.codes.nbytes + self.weight.scales.nbytes

    def __call__(self, x: Tensor | Quantized) -> Tensor:
        assert isinstance(x, Quantized)
        return multiply_int8(x, self.weight, self.dtype, self.bias, fixed_split=self.fixed_split)


@dataclass(frozen=True, slots=True)
class Fp8Matrix:
    """e4m3 by e4m3; in blocks of columns, activations have a scale for 128 columns."""

    weight: Fp8Weight
    dtype: torch.dtype  # of the result
    bias: Tensor | None = None
    fixed_split: int | None = None

    @property
    def takes(self) -> ActivationFormat | None:
        block = self.weight.block
        is_blocked = block is not None and block[1] < self.weight.codes.shape[1]
        return ActivationFormat("fp8", 128 if is_blocked else 0)

    @property
    def nbytes(self) -> int:
        return self.weight.codes.nbytes + self.weight.scales.nbytes

    def __call__(self, x: Tensor | Quantized) -> Tensor:
        assert isinstance(x, Quantized)
        return multiply_fp8(x, self.weight, self.dtype, self.bias, fixed_split=self.fixed_split)


@dataclass(frozen=True, slots=True)
class StackedMatrix:
    """Several, below each other, that one kernel cannot multiply at once."""

    parts: Sequence[Matrix]

    @property
    def takes(self) -> ActivationFormat | None:
        """What all parts take, where that is the same; else each rounds for itself."""
        first = self.parts[0].takes
        return first if all(part.takes == first for part in self.parts) else None

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def __call__(self, x: Tensor | Quantized) -> Tensor:
        if isinstance(x, Quantized):
            return torch.cat([part(x) for part in self.parts], 1)
        return torch.cat([part(rounded(x, part.takes)) for part in self.parts], 1)


def rounded(x: Tensor, format_: ActivationFormat | None) -> Tensor | Quantized:
    """Activations as a matrix takes them."""
    return x if format_ is None else quantize(x, format_)
