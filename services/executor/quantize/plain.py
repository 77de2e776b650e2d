"""Tensors that are written as they are, in 16 bits."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from services.executor.models.dequantize import pieces
from services.executor.models.weights import Checkpoint, StoredTensor, expected_shapes
from services.executor.quant.parts import Part

DTYPES: Mapping[str, torch.dtype] = MappingProxyType({"BF16": torch.bfloat16, "F16": torch.float16})


def plain_format(checkpoint: Checkpoint) -> str:
    """The source's where it has 16 bits, else BF16, which holds all numbers."""
    stored = checkpoint.formats()["embedding"]
    return stored if isinstance(stored, str) and stored in DTYPES else "BF16"


def top_names(checkpoint: Checkpoint) -> list[str]:
    """What belongs to no layer."""
    return [name for name in expected_shapes(checkpoint.spec) if not name.startswith("layers.")]


def stored_plain(checkpoint: Checkpoint, name: str, plain: str) -> Part:
    """A tensor in 16 bits; where it is stored so, no copy is made."""
    tensor = checkpoint.tensor(name)
    if isinstance(tensor, StoredTensor) and tensor.format == plain:
        return Part(plain, tensor.shape, tensor.data.reshape(-1))
    out = torch.empty(tensor.shape, dtype=DTYPES[plain])
    rows = out.view(-1, tensor.shape[-1])
    for start, piece in pieces(tensor):
        rows[start : start + len(piece)] = torch.from_numpy(piece)
    return plain_part(out, plain)


def plain_part(values: Tensor, plain: str) -> Part:
    narrow = values.to(DTYPES[plain])
    return Part(plain, tuple(values.shape), narrow.contiguous().view(torch.uint8).reshape(-1).numpy())
