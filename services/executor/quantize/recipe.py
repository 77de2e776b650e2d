"""What is made of each matrix, and how the files say so: decided before any weight is read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from services.common.errors import invalid
from services.executor.models.spec import ModelSpec
from services.executor.models.weights import expected_shapes
from services.executor.quant import awq, compressed_tensors_pack, gptq
from services.executor.quant.matrix import Fp8Matrix, QuantizedMatrix
from services.executor.quant.parts import Part
from services.executor.quantize.choice import FP8_METHODS, MIXED_BITS, Choice, MethodName, ScaleShape
from services.executor.quantize.grid import Grid
from services.executor.quantize.hf_names import module_name
from services.executor.quantize.layer import GROUPS, matrix_names

FP8_BLOCK = (128, 128)
GROUP_SIZES = (128, 64, 32)
_NEEDS_TEXT = ("gptq", "awq", "smoothquant", "gptq-fp8")
_FUSED = {"q": "self_attn.qkv_proj", "gate": "mlp.gate_up_proj"}
"""Modules that other programs make of a group of matrices, by its first."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """One method, and a grid for each matrix by canonical name (none where the method makes fp8)."""

    method: MethodName
    grids: Mapping[str, Grid]
    act_order: bool
    fp8_scales: ScaleShape

    @property
    def needs_text(self) -> bool:
        return self.method in _NEEDS_TEXT

    @property
    def is_fp8(self) -> bool:
        return self.method in FP8_METHODS

    @property
    def is_mixed(self) -> bool:
        return len(set(self.grids.values())) > 1

    def by_layer(self) -> list[dict[str, dict[str, int]]]:
        """Bits and group size of the groups of matrices in each layer, where those of a group share a grid."""
        prefixes = dict.fromkeys(name.rpartition(".")[0] for name in self.grids)
        return [
            {group: _settings(self.grids[f"{prefix}.{names[0]}"]) for group, names in GROUPS.items()}
            for prefix in prefixes
        ]

    def fp8_block(self, rows: int, columns: int) -> tuple[int, int]:
        """Rows and columns that share a scale, in a matrix of that shape."""
        return {"channel": (1, columns), "tensor": (rows, columns), "block": FP8_BLOCK}[self.fp8_scales]

    def __str__(self) -> str:
        if self.is_fp8:
            return f"{self.method} e4m3, one scale a {self.fp8_scales}"
        grid = self._common
        sign = "symmetric" if grid.is_symmetric else "asymmetric"
        sizes = _span([own.group_size or 0 for own in self.grids.values()])
        groups = "one scale a row" if grid.group_size is None else f"groups of {sizes}"
        order = ", act-order" if self.act_order else ""
        return f"{self.method}, {_span([own.bits for own in self.grids.values()])} bits, {groups}, {sign}{order}"

    def pack(self, matrix: QuantizedMatrix) -> dict[str, Part]:
        """The tensors that hold a matrix in the files."""
        if isinstance(matrix, Fp8Matrix):
            return compressed_tensors_pack.pack_fp8(matrix, "BF16")
        if self.method == "smoothquant":
            return compressed_tensors_pack.pack_bytes(matrix, "BF16")
        return awq.pack(matrix) if self._is_awq else gptq.pack(matrix, self._zero_format)

    def label(self) -> dict[str, Any]:
        """The `quantization_config` of the checkpoint."""
        if self.is_fp8:
            block = FP8_BLOCK if self.fp8_scales == "block" else None
            weights = compressed_tensors_pack.fp8_weights(self.fp8_scales, block)
            return compressed_tensors_pack.label("float-quantized", weights, self._fp8_inputs())
        grid = self._common
        group_size = -1 if grid.group_size is None else grid.group_size
        if self.method == "smoothquant":
            weights = compressed_tensors_pack.integer_weights(grid.bits, group_size)
            return compressed_tensors_pack.label("int-quantized", weights, compressed_tensors_pack.INT8_INPUTS)
        if self._is_awq:
            return awq.label(group_size)
        label = gptq.label(
            grid.bits,
            group_size,
            is_symmetric=grid.is_symmetric,
            is_ordered=self.act_order,
            zero_format=self._zero_format,
        )
        rules = {
            _pattern(names): {**_settings(own), "sym": own.is_symmetric} for names, own in self._runs() if own != grid
        }
        return label | ({"dynamic": rules} if rules else {})

    def _runs(self) -> Iterator[tuple[Sequence[str], Grid]]:
        """Groups of matrices that share a grid; where a group's matrices do not, each of them."""
        for prefix in dict.fromkeys(name.rpartition(".")[0] for name in self.grids):
            for parts in GROUPS.values():
                names = [f"{prefix}.{part}" for part in parts]
                grids = [self.grids[name] for name in names]
                if len(set(grids)) == 1:
                    yield names, grids[0]
                else:
                    yield from (([name], grid) for name, grid in zip(names, grids, strict=True))

    def _fp8_inputs(self) -> dict[str, Any]:
        inputs = dict(compressed_tensors_pack.FP8_INPUTS)
        return inputs | ({"strategy": "group", "group_size": FP8_BLOCK[1]} if self.fp8_scales == "block" else {})

    @property
    def _is_awq(self) -> bool:
        """AWQ's own format holds 4 bits only; other grids that AWQ found are written as GPTQ's."""
        return self.method == "awq" and all(grid.bits == awq.BITS for grid in self.grids.values())

    @property
    def _zero_format(self) -> gptq.ZeroFormat:
        """Zero points of 3 bits are only read right everywhere as they are."""
        return "gptq_v2" if any(grid.bits == 3 for grid in self.grids.values()) else "gptq"

    @property
    def _common(self) -> Grid:
        """What most matrices have."""
        grids = list(self.grids.values())
        return max(grids, key=grids.count)


def plan(choice: Choice, spec: ModelSpec) -> Recipe:
    """The same grid for every matrix. Raises INVALID_FIELD for groups that do not fit the model."""
    fp8_scales = choice.fp8_scales or "channel"
    if choice.method in FP8_METHODS:
        return Recipe(choice.method, {}, False, fp8_scales)
    if choice.method == "smoothquant":
        grid = Grid(8, None, True, torch.bfloat16)
    else:
        grid = _integers(choice, choice.bits or 4, _group_size(choice.group_size, spec))
    return Recipe(choice.method, dict.fromkeys(matrix_names(spec), grid), choice.act_order, fp8_scales)


def candidates(choice: Choice, spec: ModelSpec) -> list[Grid]:
    """What a matrix may become where each gets what it needs. Raises INVALID_FIELD for groups that do not fit."""
    largest = _group_size(choice.group_size, spec)
    if choice.group_size is None and largest is not None:
        sizes: Sequence[int | None] = [size for size in GROUP_SIZES if size <= largest]
    else:
        sizes = [largest]
    return [_integers(choice, bits, size) for bits in choice.mixed_bits or MIXED_BITS for size in sizes]


def _integers(choice: Choice, bits: int, group_size: int | None) -> Grid:
    is_symmetric = choice.method != "awq" if choice.is_symmetric is None else choice.is_symmetric
    return Grid(bits, group_size, is_symmetric, torch.float16)


def _group_size(asked: int | None, spec: ModelSpec) -> int | None:
    """Columns of a group; None for all. Other programs take no short last groups, so none are made."""
    shapes = expected_shapes(spec)
    widths = {shapes[name][1]: name for name in reversed(matrix_names(spec))}
    if asked == -1:
        return None
    for size in (asked,) if asked else GROUP_SIZES:
        if not any(width % size for width in widths):
            return size
    if asked is None:
        return None
    width, name = next((width, name) for width, name in reversed(widths.items()) if width % asked)
    raise invalid("--group-size", f"{name} has {width} columns, which groups of {asked} do not divide")


def _pattern(names: Sequence[str]) -> str:
    """The rule of GPTQModel's that matches the modules of one layer, also where they are fused."""
    modules = [module_name(name) for name in names]
    fused = _FUSED.get(names[0].rpartition(".")[2]) if len(names) > 1 else None
    if fused is not None:
        modules.append(".".join([*modules[0].split(".")[:-2], fused]))
    return f"+:^(?:{'|'.join(map(re.escape, modules))})$" if len(modules) > 1 else f"+:^{re.escape(modules[0])}$"


def _span(values: Sequence[int]) -> str:
    return str(min(values)) if min(values) == max(values) else f"{min(values)} to {max(values)}"


def _settings(grid: Grid) -> dict[str, int]:
    return {"bits": grid.bits, "group_size": grid.group_size or -1}
