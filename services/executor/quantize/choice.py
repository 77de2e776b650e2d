"""What a user may ask for, checked as far as that needs no model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from services.common.errors import invalid

MethodName = Literal["rtn", "gptq", "awq", "smoothquant", "fp8", "gptq-fp8"]
FP8_METHODS = ("fp8", "gptq-fp8")
MIXED_BITS = (2, 3, 4, 8)
MOST_BITS = 32
ScaleShape = Literal["channel", "tensor", "block"]


@dataclass(frozen=True, slots=True)
class Choice:
    """None leaves it to the method. Raises INVALID_FIELD for what the method has no use for."""

    method: MethodName
    bits: int | None = None
    group_size: int | None = None  # -1: one scale a row
    is_symmetric: bool | None = None
    act_order: bool = False
    fp8_scales: ScaleShape | None = None
    bits_per_weight: float | None = None  # on average; every layer gets what it needs
    mixed_bits: tuple[int, ...] | None = None  # that it may get

    def __post_init__(self) -> None:
        method = self.method
        if method in ("smoothquant", *FP8_METHODS):
            if self.bits not in (None, 8):
                raise invalid("--bits", f"{method} has 8, not {self.bits}")
            if self.group_size is not None:
                raise invalid("--group-size", f"{method} has no groups")
            if self.is_symmetric is False:
                raise invalid("--asymmetric", f"{method} is symmetric")
        if self.act_order and method != "gptq":
            raise invalid("--act-order", f"it is gptq's, not {method}'s")
        if self.bits_per_weight is not None:
            if method != "gptq":
                raise invalid("--auto", f"it is gptq's, not {method}'s")
            if self.bits is not None:
                raise invalid("--bits", "--auto chooses them")
            if not 0 < self.bits_per_weight <= MOST_BITS:
                raise invalid("--bits-per-weight", f"{self.bits_per_weight:g} is not in 0..{MOST_BITS}")
        if self.mixed_bits is not None:
            if self.bits_per_weight is None:
                raise invalid("--auto-bits", "it is for --auto")
            if not self.mixed_bits or not set(self.mixed_bits) <= set(MIXED_BITS):
                raise invalid("--auto-bits", f"{', '.join(map(str, self.mixed_bits))}: some of {MIXED_BITS}")
        if self.fp8_scales is not None and method not in FP8_METHODS:
            raise invalid("--scales", f"it is fp8's and gptq-fp8's, not {method}'s")


@dataclass(frozen=True, slots=True)
class CalibrationSize:
    """How much text."""

    samples: int
    context: int  # tokens of a sample


@dataclass(frozen=True, slots=True)
class Source:
    """A model to make a smaller one of, and the text that it is measured on."""

    name: str  # as the user named it
    path: Path
    text: str | None  # None: what the model writes itself
    size: CalibrationSize
    threads: int  # 0: as many as torch takes
