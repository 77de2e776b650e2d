"""Tensors that are not quantized: they are written in 16 bits."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from services.executor.models.dequantize import pieces
from services.executor.models.weights import Checkpoint, StoredTensor, expected_shapes
from services.executor.quant.parts import Part
from services.executor.quantize.finite import check_computed, check_read
from services.executor.quantize.hf_names import plain_name

DTYPES: Mapping[str, torch.dtype] = MappingProxyType({"BF16": torch.bfloat16, "F16": torch.float16})


def plain_format(checkpoint: Checkpoint) -> str:
    """The source's where it has 16 bits, else BF16: it has the range of fp32, with fewer digits."""
    stored = checkpoint.formats()["embedding"]
    return stored if isinstance(stored, str) and stored in DTYPES else "BF16"


def top_parts(checkpoint: Checkpoint, plain: str) -> dict[str, Part]:
    """What belongs to no layer, by the names of the files. Raises MODEL_LOAD_FAILED and NOT_FINITE."""
    names = [name for name in expected_shapes(checkpoint.spec) if not name.startswith("layers.")]
    return {plain_name(name): stored_plain(checkpoint, name, plain) for name in names}


def stored_plain(checkpoint: Checkpoint, name: str, plain: str) -> Part:
    """A tensor in 16 bits; where it is stored so, no copy is made. Raises MODEL_LOAD_FAILED and NOT_FINITE."""
    tensor = checkpoint.tensor(name)
    if isinstance(tensor, StoredTensor) and tensor.format == plain:
        for _, piece in pieces(tensor):
            check_read(name, piece)
        return Part(plain, tensor.shape, tensor.data.reshape(-1))
    out = torch.empty(tensor.shape, dtype=DTYPES[plain])
    rows = out.view(-1, tensor.shape[-1])
    for start, piece in pieces(tensor):
        check_read(name, piece)
        rows[start : start + len(piece)] = narrowed(name, torch.from_numpy(piece), plain)
    return _part(out, plain)


def plain_part(name: str, values: Tensor, plain: str) -> Part:
    """Numbers of a tensor in 16 bits. Raises NOT_FINITE."""
    return _part(narrowed(name, values, plain), plain)


def narrowed(name: str, values: Tensor, plain: str) -> Tensor:
    """Numbers of a tensor as they are written. Raises NOT_FINITE where some are too large for that."""
    narrow = values.to(DTYPES[plain])
    check_computed(f"tensor {name} in {plain}", narrow)
    return narrow


def _part(narrow: Tensor, plain: str) -> Part:
    return Part(plain, tuple(narrow.shape), narrow.contiguous().view(torch.uint8).reshape(-1).numpy())
