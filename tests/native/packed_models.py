"""Small models packed for native code, and the same models as folders with exactly the weights that were packed."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from kernels import _native
from services.executor.backends.cpu.packed_file import Contents
from services.executor.backends.cpu.packed_weights import PackedWeights
from services.executor.backends.cpu.packing import pack
from services.executor.backends.cpu.packing_plan import plan_for
from services.executor.backends.cpu.program import build_program
from services.executor.models.checkpoint import open_checkpoint
from services.executor.models.hf import canonical_name
from services.executor.models.spec import ModelSpec
from services.executor.models.weights import Checkpoint
from tests.unit.executor.packing_fakes import column_order, matrix_names, read_matrix, row_order

if TYPE_CHECKING:
    from tests.fixtures.models import Inputs

SETS: Sequence[str] = _native.instruction_sets()
FORMATS: Sequence[str] = tuple(_native.FORMATS)
FUSED = tuple(name for name in SETS if name != "portable")
"""Sets that multiply and add without rounding between: the same bits wherever the order of operations is the same."""

ROUNDS_TO_BF16 = "avx512_vnni"
"""The set that rounds to bf16 what bf16 matrices multiply."""

_NAMES = {number: name for name, number in _native.FORMATS.items()}


@dataclass(frozen=True)
class PackedModel:
    spec: ModelSpec
    weights: PackedWeights

    @property
    def formats(self) -> set[str]:
        """Of all matrices."""
        return {_NAMES[matrix.format] for matrix in self.weights.matrices.values()}

    def format_of(self, matrix: str) -> str:
        return _NAMES[self.weights.matrix(matrix).format]

    def input_order(self, matrix: str) -> torch.Tensor:
        """The input that each column of a matrix multiplies, -1 for none."""
        prefix, _, part = matrix.rpartition(".")
        inputs = prefix + ("." if prefix else "") + ("qkv" if part in ("q", "k", "v") else part)
        k, offset = self.weights.matrix(matrix).k, self.weights.vector(f"{inputs}_order")
        if offset < 0:
            return torch.arange(k)
        return torch.tensor(self.weights.buffer[offset : offset + 4 * k].view(np.int32).astype(np.int64))

    def native(self, pool: _native.ThreadPool, instruction_set: str) -> _native.Model:
        return _native.Model(build_program(self.spec, self.weights), self.weights.buffer, pool, instruction_set)


def pack_model(path: Path, format_: str = "f32") -> PackedModel:
    """A folder's weights, matrices in `format_` where their widths allow it."""
    return pack_checkpoint(open_checkpoint(path), format_)


def pack_checkpoint(checkpoint: Checkpoint, format_: str = "auto") -> PackedModel:
    plan = plan_for(checkpoint, format_)
    buffer = aligned(plan.size)
    pack(checkpoint, plan, buffer, threads=1)
    weights = Contents.of(plan, (), checkpoint.spec.tied_embeddings).weights(buffer, mapped_bytes=0)
    return PackedModel(checkpoint.spec, weights)


def aligned(size: int) -> NDArray[np.uint8]:
    """Bytes that start at a multiple of 64."""
    memory = np.zeros(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size]


def as_multiplied(model: PackedModel, instruction_set: str) -> Inputs:
    """Rounds as native code does what matrices multiply: to int8, for q8 and q6k int16, 32 values a scale, or bf16."""

    def inputs(x: torch.Tensor, name: str) -> torch.Tensor:
        tensor = canonical_name(f"{name}.weight")
        if tensor is None or "self_attn" in tensor:
            return x  # keys and values
        matrix = tensor.replace("embedding", "head").replace(".gate", ".gate_up").replace(".up", ".gate_up")
        format_ = model.format_of(matrix)
        if format_ in ("f32", "f8") or (format_ == "bf16" and instruction_set != ROUNDS_TO_BF16):
            return x
        if format_ == "bf16":
            return x.bfloat16().double()
        columns = torch.tensor(column_order(model.spec, matrix))
        padded = x[:, columns] * (columns >= 0)
        order = model.input_order(matrix)
        groups = (padded[:, order] * (order >= 0)).unflatten(1, (-1, 32))
        steps = groups.abs().amax(2, keepdim=True) / (32767 if format_ in ("q8", "q6k") else 127)
        rounded = (groups / steps.where(steps > 0, 1)).round() * steps
        padded[:, order[order >= 0]] = rounded.flatten(1)[:, order >= 0]
        return padded[:, columns >= 0]

    return inputs


def dequantize(path: Path, model: PackedModel, target: Path) -> Path:
    """The folder at `path` with matrices as they were packed."""
    shutil.copytree(path, target)
    stored = load_file(path / "model.safetensors")
    names = {canonical_name(name): name for name in stored}
    spec = model.spec
    for matrix in matrix_names(spec):
        if matrix == "head" and spec.tied_embeddings:
            continue
        values = read_matrix(model.weights, matrix)[1][:, np.array(column_order(spec, matrix)) >= 0]
        for row, place in zip(values, row_order(spec, matrix), strict=True):
            if place is not None:
                stored[names[place[0]]][place[1]] = row
    save_file(stored, target / "model.safetensors", metadata={"format": "pt"})
    return target
