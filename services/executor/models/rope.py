"""The angles of rotary positions, with their scalings."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from services.executor.models.spec import RopeScaling

Float32 = NDArray[np.float32]


def inverse_frequencies(head_size: int, theta: float, scaling: RopeScaling | None) -> Float32:
    """Radians per position of each of the head_size / 2 pairs."""
    exponents = np.arange(0, head_size, 2, dtype=np.float64) / head_size
    plain = 1.0 / theta**exponents
    if scaling is None:
        scaled = plain
    elif scaling.kind == "linear":
        scaled = plain / scaling.factor
    elif scaling.kind == "llama3":
        scaled = _llama3(plain, scaling)
    else:
        scaled = plain / np.asarray(scaling.factors, np.float64)
    return scaled.astype(np.float32)


def _llama3(plain: NDArray[np.float64], scaling: RopeScaling) -> NDArray[np.float64]:
    """Keeps high frequencies, divides low ones by the factor, and blends between the two wavelengths."""
    turns = scaling.original_context_length * plain / (2 * math.pi)
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return plain * (keep + (1 - keep) / scaling.factor)


def rotation_table(frequencies: Float32, length: int) -> tuple[Float32, Float32]:
    """Cosines and sines [length, head_size / 2]. Angles are rounded to fp32, as the models were trained."""
    angles = np.arange(length, dtype=np.float32)[:, None] * frequencies
    return np.cos(angles, dtype=np.float64).astype(np.float32), np.sin(angles, dtype=np.float64).astype(np.float32)
