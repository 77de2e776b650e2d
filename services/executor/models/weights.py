"""Weights under one set of names, whatever the file: what a checkpoint offers and what a spec needs.

Names: `embedding`, `final_norm`, `head` (absent when tied), and per layer `layers.N.` with `attention_norm`, `q`, `k`,
`v`, `o`, `mlp_norm`, `gate`, `up`, `down`; biases end in `_bias`. Matrices are [output, input]; the rows of q and k
are in the order of Hugging Face Llama, where a rotary pair is (i, i + head_size / 2).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from services.common.errors import QuireError, Reason
from services.executor.models.spec import ModelSpec, RopeScaling
from services.executor.quant.matrix import QuantizedFormat, QuantizedMatrix
from services.executor.quant.nibbles import NibbleMatrix

Bytes = NDArray[np.uint8]
Shape = tuple[int, ...]

_MESSAGE_LETTERS = 1000
_MOST = {"layer_count": 1 << 12, "head_size": 1 << 12, "context_length": 1 << 24}
"""Sizes that no tensor's shape vouches for, and that memory is taken by."""

PLAIN_FORMATS = {"F32": 4, "F16": 2, "BF16": 2}
"""Bytes per value of the formats that are not quantized."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor as the file holds it, usually a view of mapped memory."""

    name: str
    shape: Shape
    format: str  # a key of PLAIN_FORMATS, or a ggml type such as Q4_1
    data: Bytes  # [rows, bytes per row]; a vector is one row


@dataclass(frozen=True, slots=True)
class Activations:
    """How a checkpoint wants the inputs of a matrix rounded before they are multiplied."""

    kind: Literal["int8", "fp8"]
    per: Literal["token", "tensor", "group"]
    scale: float | None = None  # fixed beforehand; None: of the inputs themselves
    is_symmetric: bool = True


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """A matrix in a quantized form, whose rows are unpacked when they are read."""

    name: str
    shape: Shape  # [N, K]
    format: QuantizedFormat
    read: Callable[[int, int], QuantizedMatrix]  # rows from..to; any number of threads at a time
    activations: Activations | None = None  # None: as they are
    read_nibbles: Callable[[int, int], NibbleMatrix] | None = None  # the same, where its 4 bits can stay packed


Tensor = StoredTensor | QuantizedTensor
Format = str | QuantizedFormat


class Checkpoint(Protocol):
    """An opened model: its spec and its tensors by canonical name, read one at a time."""

    spec: ModelSpec

    def shapes(self) -> Mapping[str, Shape]:
        """Every known tensor with its shape."""
        ...

    def formats(self) -> Mapping[str, Format]:
        """The format of every known tensor, as `tensor` gives it; reads no tensor."""
        ...

    def tensor(self, name: str) -> Tensor:
        """The named tensor."""
        ...

    def files(self) -> Sequence[Path]:
        """The files that hold the weights and say what they mean, in a fixed order."""
        ...


def load_failed(message: str) -> QuireError:
    """MODEL_LOAD_FAILED. What a file says may stand in the message, however long and whatever its letters."""
    text = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in message[:_MESSAGE_LETTERS])
    return QuireError(Reason.MODEL_LOAD_FAILED, text + "..." * (len(message) > _MESSAGE_LETTERS))


def expected_shapes(spec: ModelSpec) -> dict[str, Shape]:
    """Every tensor that a model of this spec has."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    shapes: dict[str, Shape] = {"embedding": (spec.vocab_size, hidden), "final_norm": (hidden,)}
    if not spec.tied_embeddings:
        shapes["head"] = (spec.vocab_size, hidden)
    matrices = {
        "q": (spec.query_size, hidden, spec.attention_bias),
        "k": (spec.kv_size, hidden, spec.attention_bias),
        "v": (spec.kv_size, hidden, spec.attention_bias),
        "o": (hidden, spec.query_size, spec.output_bias),
        "gate": (inner, hidden, spec.mlp_bias),
        "up": (inner, hidden, spec.mlp_bias),
        "down": (hidden, inner, spec.mlp_bias),
    }
    for layer in range(spec.layer_count):
        prefix = f"layers.{layer}."
        shapes[prefix + "attention_norm"] = shapes[prefix + "mlp_norm"] = (hidden,)
        for name, (rows, columns, bias) in matrices.items():
            shapes[prefix + name] = (rows, columns)
            if bias:
                shapes[prefix + name + "_bias"] = (rows,)
    return shapes


def check_shapes(checkpoint: Checkpoint) -> None:
    """Raises MODEL_LOAD_FAILED naming the tensor that is missing, has another shape, or is not part of the spec."""
    found = checkpoint.shapes()
    expected = expected_shapes(checkpoint.spec)
    for name, shape in expected.items():
        if name not in found:
            raise load_failed(f"tensor {name} {list(shape)} is missing")
        if found[name] != shape:
            raise load_failed(f"tensor {name} has shape {list(found[name])}, expected {list(shape)}")
    extra = sorted(found.keys() - expected.keys() - {"head"})
    if extra:
        raise load_failed(f"tensor {extra[0]} is not part of architecture {checkpoint.spec.architecture}")


def check_spec(spec: ModelSpec) -> ModelSpec:
    """The spec itself, or MODEL_LOAD_FAILED where its numbers contradict each other."""
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "layer_count", "head_count", "kv_head_count")
    for name in (*sizes, "head_size", "context_length"):
        if getattr(spec, name) < 1:
            raise load_failed(f"{name} is {getattr(spec, name)}, expected at least 1")
    for name, most in _MOST.items():
        if getattr(spec, name) > most:
            raise load_failed(f"{name} is {getattr(spec, name)}, expected at most {most}")
    if spec.head_count % spec.kv_head_count:
        raise load_failed(f"{spec.head_count} heads cannot share {spec.kv_head_count} key and value heads")
    if spec.head_size % 2:
        raise load_failed(f"head size {spec.head_size} is odd; rotary positions need pairs")
    for name in ("norm_epsilon", "rope_theta"):
        if not _is_positive(getattr(spec, name)):
            raise load_failed(f"{name} is {getattr(spec, name)}, expected a number above 0")
    if spec.rope_scaling is not None:
        _check_scaling(spec.rope_scaling, spec.head_size)
    return spec


def _check_scaling(scaling: RopeScaling, head_size: int) -> None:
    if scaling.factors and len(scaling.factors) != head_size // 2:
        raise load_failed(f"{len(scaling.factors)} rope factors for head size {head_size}")
    if not all(map(_is_positive, (scaling.factor, scaling.original_context_length, *scaling.factors))):
        raise load_failed(f"rope scaling {scaling.kind}: factors and lengths must be numbers above 0")
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    if not (_is_positive(low) and _is_positive(high) and low < high):
        raise load_failed(f"rope scaling {scaling.kind}: frequency factors {low} and {high}, expected 0 < low < high")


def _is_positive(number: float) -> bool:
    return math.isfinite(number) and number > 0


def fingerprint(digests: Iterable[bytes], spec: ModelSpec, numerics: str) -> str:
    """Hex SHA-256 over the weight files' digests, the spec and the backend's numerics, each part length-prefixed."""
    digest = hashlib.sha256()
    for part in (*digests, repr(astuple(spec)).encode(), numerics.encode()):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def file_digest(path: Path) -> bytes:
    """SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()
