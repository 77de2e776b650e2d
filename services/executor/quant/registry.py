"""Finds how a checkpoint is quantized: by what its label says, which each matrix is then checked against."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from services.executor.models.weights import load_failed
from services.executor.quant.awq import AwqScheme
from services.executor.quant.compressed_tensors import CompressedTensorsScheme
from services.executor.quant.fp8 import Fp8Scheme
from services.executor.quant.gptq import GptqScheme
from services.executor.quant.scheme import Label, Scheme

SCHEMES: Mapping[str, Callable[[Label], Scheme]] = MappingProxyType(
    {
        "gptq": GptqScheme,
        "awq": AwqScheme,
        "compressed-tensors": CompressedTensorsScheme,
        "fp8": Fp8Scheme,
    }
)
"""By `quant_method`."""

LABEL_FILES: Mapping[str, str] = MappingProxyType({"quantize_config.json": "gptq", "quant_config.json": "awq"})
"""Files that hold the label of older checkpoints, whose config.json has none, and the method they imply."""


def label_in(config: Mapping[str, Any]) -> Label | None:
    """The label in a config.json; None where there is none."""
    label = config.get("quantization_config") or config.get("compression_config")
    if label is not None and not isinstance(label, dict):
        raise load_failed(f"config.json: quantization_config is {label!r}, expected an object")
    return label


def find_scheme(label: Label) -> Scheme:
    """The scheme. MODEL_LOAD_FAILED for one that is not known, or whose settings are missing or wrong."""
    method = str(label.get("quant_method", "none")).lower()
    if method not in SCHEMES:
        raise load_failed(f"quant_method {method} is not supported; supported: {', '.join(SCHEMES)}")
    return SCHEMES[method](label)
