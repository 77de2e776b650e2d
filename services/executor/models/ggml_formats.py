"""The number formats of GGUF files: how many values share how many bytes, and which can be turned into fp32.

A table of our own, so that opening a file needs no import of the gguf package; a test holds it to that package's.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GgmlFormat:
    """A block of `values` numbers takes `bytes` bytes."""

    name: str
    values: int
    bytes: int
    readable: bool = True  # whether it can be dequantized


FORMATS = {
    0: GgmlFormat("F32", 1, 4),
    1: GgmlFormat("F16", 1, 2),
    2: GgmlFormat("Q4_0", 32, 18),
    3: GgmlFormat("Q4_1", 32, 20),
    6: GgmlFormat("Q5_0", 32, 22),
    7: GgmlFormat("Q5_1", 32, 24),
    8: GgmlFormat("Q8_0", 32, 34),
    9: GgmlFormat("Q8_1", 32, 40, readable=False),
    10: GgmlFormat("Q2_K", 256, 84),
    11: GgmlFormat("Q3_K", 256, 110),
    12: GgmlFormat("Q4_K", 256, 144),
    13: GgmlFormat("Q5_K", 256, 176),
    14: GgmlFormat("Q6_K", 256, 210),
    15: GgmlFormat("Q8_K", 256, 292, readable=False),
    16: GgmlFormat("IQ2_XXS", 256, 66),
    17: GgmlFormat("IQ2_XS", 256, 74),
    18: GgmlFormat("IQ3_XXS", 256, 98),
    19: GgmlFormat("IQ1_S", 256, 50),
    20: GgmlFormat("IQ4_NL", 32, 18),
    21: GgmlFormat("IQ3_S", 256, 110),
    22: GgmlFormat("IQ2_S", 256, 82),
    23: GgmlFormat("IQ4_XS", 256, 136),
    24: GgmlFormat("I8", 1, 1, readable=False),
    25: GgmlFormat("I16", 1, 2, readable=False),
    26: GgmlFormat("I32", 1, 4, readable=False),
    27: GgmlFormat("I64", 1, 8, readable=False),
    28: GgmlFormat("F64", 1, 8, readable=False),
    29: GgmlFormat("IQ1_M", 256, 56),
    30: GgmlFormat("BF16", 1, 2),
    34: GgmlFormat("TQ1_0", 256, 54),
    35: GgmlFormat("TQ2_0", 256, 66),
    39: GgmlFormat("MXFP4", 32, 17),
    40: GgmlFormat("NVFP4", 64, 36),
    41: GgmlFormat("Q1_0", 128, 18, readable=False),
}


def format_of(type_id: int) -> GgmlFormat:
    """The format that a file means by this number. ValueError where none is known."""
    if type_id not in FORMATS:
        raise ValueError(f"ggml type {type_id} is not known")
    return FORMATS[type_id]


def is_readable(name: str) -> bool:
    """Whether tensors of this format can be turned into fp32."""
    return any(known.name == name and known.readable for known in FORMATS.values())
