"""Checkpoints made up in memory, and what their packed weights must hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from kernels.matmul.reference import unpack
from services.executor.backends.cpu.formats import FORMATS
from services.executor.backends.cpu.packed_file import Contents
from services.executor.backends.cpu.packed_weights import PackedWeights
from services.executor.backends.cpu.packing import pack
from services.executor.backends.cpu.packing_plan import plan_for
from services.executor.models.dequantize import to_float32
from services.executor.models.spec import ModelSpec
from services.executor.models.weights import Format, StoredTensor, expected_shapes

SPEC = ModelSpec(
    architecture="llama",
    vocab_size=70,
    hidden_size=96,
    intermediate_size=160,
    layer_count=2,
    head_count=4,
    kv_head_count=2,
    head_size=32,
    context_length=128,
    norm_epsilon=1e-5,
    rope_theta=10000.0,
)
"""Widths that are whole groups of 32."""

ODD_SPEC = replace(SPEC, hidden_size=42, intermediate_size=50, head_size=20, attention_bias=True, output_bias=True,
                   mlp_bias=True, tied_embeddings=True, layer_count=1)  # fmt: skip
"""Every size needs padding."""

WIDE_SPEC = replace(SPEC, hidden_size=256, intermediate_size=256, head_size=64, layer_count=1)
"""Widths that are whole blocks of 256."""

SCALES_AT = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "IQ4_NL": [0],
             "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "Q3_K": [108]}  # fmt: skip
"""Bytes of a block at which its fp16 scales lie."""


@dataclass
class MadeCheckpoint:
    """Tensors in memory."""

    spec: ModelSpec
    tensors: dict[str, Any]  # StoredTensor or QuantizedTensor

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    def formats(self) -> Mapping[str, Format]:
        return {name: tensor.format for name, tensor in self.tensors.items()}

    def tensor(self, name: str) -> Any:
        return self.tensors[name]

    def files(self) -> Sequence[Path]:
        return []


def stored(name: str, values: np.ndarray, format_: str = "F32") -> StoredTensor:
    """Values as a plain tensor; BF16 cuts the low bits off."""
    rows = values.reshape(-1, values.shape[-1])
    match format_:
        case "BF16":
            data = (rows.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        case _:
            data = rows.astype({"F32": np.float32, "F16": np.float16}[format_])
    return StoredTensor(name, values.shape, format_, np.ascontiguousarray(data).view(np.uint8))


def random_blocks(name: str, shape: tuple[int, ...], format_: str, rng: np.random.Generator) -> StoredTensor:
    """Any bits but for the scales, which are moderate numbers of either sign."""
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[format_]]
    blocks = rng.integers(0, 256, (shape[0], shape[1] // block, size), np.uint8)
    for at in SCALES_AT[format_]:
        scales = rng.normal(0, 0.02, blocks.shape[:2]).astype(np.float16)
        blocks[..., at : at + 2] = scales[..., None].view(np.uint8)
    return StoredTensor(name, shape, format_, blocks.reshape(shape[0], -1))


def make_checkpoint(spec: ModelSpec, format_: str = "F32", seed: int = 0, **others: str) -> MadeCheckpoint:
    """Random weights, matrices in `format_` but for those whose last name is in `others`."""
    rng = np.random.default_rng(seed)
    tensors: dict[str, Any] = {}
    for name, shape in expected_shapes(spec).items():
        kind = others.get(name.rpartition(".")[2], format_)
        if len(shape) == 1 or kind not in SCALES_AT:
            values = rng.normal(0, 1, shape).astype(np.float32)
            tensors[name] = stored(name, values, kind if len(shape) > 1 else "F32")
        else:
            tensors[name] = random_blocks(name, shape, kind, rng)
    return MadeCheckpoint(spec, tensors)


def packed(checkpoint: MadeCheckpoint, wanted: str = "auto", threads: int = 1) -> PackedWeights:
    """The checkpoint's weights in a poisoned buffer: what is not written shows."""
    plan = plan_for(checkpoint, wanted)
    buffer = np.full(plan.size, 0xA5, np.uint8)
    pack(checkpoint, plan, buffer, threads)
    return Contents.of(plan, (), checkpoint.spec.tied_embeddings).weights(buffer, mapped_bytes=0)


def read_matrix(weights: PackedWeights, name: str) -> tuple[str, np.ndarray]:
    """Format and values [rows, k] of a packed matrix."""
    number, rows, k, offset = weights.matrix(name)
    format_ = next(name for name, value in FORMATS.items() if value == number)
    return format_, unpack(format_, weights.buffer[offset : offset + rows // 32 * panel_size(format_, k)], rows, k)


def panel_size(format_: str, k: int) -> int:
    """Bytes of a panel, written apart from the code under test."""
    sizes = {"f32": k * 128, "bf16": k * 64, "q8": k // 32 * 1088, "q8c": k * 32 + 128}
    sizes |= {"f8": k * 32 + (k + 127) // 128 * 128}
    sizes |= {f"q4zg{size}": k * 16 + k // size * 96 for size in (32, 64, 128)}
    sizes |= {f"q4g{size}": k * 16 + k // size * 64 for size in (32, 64, 128)}
    sizes |= {"q4k": k // 256 * 4736, "q6k": k // 256 * 6720}
    sizes |= {f"q4mg{size}": k * 16 + k // size * 128 for size in (32, 64, 128)}
    return sizes[format_]


Place = tuple[str, int] | None
"""A tensor's row, or padding."""


def row_order(spec: ModelSpec, name: str) -> Iterator[Place]:
    """What each row of a packed matrix holds, told row by row."""
    prefix, _, part = name.rpartition(".")
    prefix += "." if prefix else ""
    heads = spec.head_count if part == "q" else spec.kv_head_count
    half = spec.head_size // 2
    half_panels = -(-half // 16)
    if part in ("q", "k"):
        for head in range(heads):
            for row in range(half_panels * 32):
                dim, second = row // 32 * 16 + row % 16, row % 32 >= 16
                yield (name, head * spec.head_size + dim + half * second) if dim < half else None
    elif part == "v":
        for head in range(heads):
            for dim in range(half_panels * 32):
                yield (name, head * spec.head_size + dim) if dim < spec.head_size else None
    elif part == "gate_up":
        for row in range(-(-spec.intermediate_size // 32) * 64):
            source, index = "up" if row % 32 >= 16 else "gate", row // 32 * 16 + row % 16
            yield (prefix + source, index) if index < spec.intermediate_size else None
    else:
        count = spec.vocab_size if part in ("embedding", "head") else spec.hidden_size
        for row in range(-(-count // 32) * 32):
            yield (name, row) if row < count else None


def column_order(spec: ModelSpec, name: str) -> list[int]:
    """Which of the tensor's columns each packed column holds; -1 is padding."""
    if name.endswith(".o"):
        padded = -(-spec.head_size // 2 // 16) * 32
        return [
            head * spec.head_size + dim if dim < spec.head_size else -1
            for head in range(spec.head_count)
            for dim in range(padded)
        ]
    count = spec.intermediate_size if name.endswith(".down") else spec.hidden_size
    return [column if column < count else -1 for column in range(-(-count // 32) * 32)]


def expected_matrix(checkpoint: MadeCheckpoint, name: str) -> np.ndarray:
    """The values [rows, k] that a packed matrix should have, before rounding."""
    places = list(row_order(checkpoint.spec, name))
    values = {place[0]: to_float32(checkpoint.tensor(place[0])) for place in places if place}
    order = np.array(column_order(checkpoint.spec, name))
    out = np.zeros((len(places), len(order)), np.float32)
    for row, place in enumerate(places):
        if place:
            out[row, order >= 0] = values[place[0]][place[1], order[order >= 0]]
    return out


def matrix_names(spec: ModelSpec) -> list[str]:
    parts = ("q", "k", "v", "o", "gate_up", "down")
    layers = [f"layers.{layer}.{part}" for layer in range(spec.layer_count) for part in parts]
    return ["embedding", "head", *layers]
