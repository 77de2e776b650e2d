"""A checkpoint as matrices on the device: each in its file's format where a kernel multiplies that, else widened."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch

from kernels.quant_matmul import Fp8Weight, Int8Weight, pack_int4
from services.executor.backends.cuda.backend import DTYPES, CudaBackend, StepSizes
from services.executor.backends.cuda.device import Device
from services.executor.backends.cuda.int4_parts import Int4Parts, int4_parts, stacked
from services.executor.backends.cuda.matrices import (
    Fp8Matrix,
    Int4Matrix,
    Int8Matrix,
    Matrix,
    PlainMatrix,
    StackedMatrix,
)
from services.executor.backends.cuda.model import PRODUCT_SPLIT
from services.executor.backends.cuda.weights import GpuLayer, GpuWeights
from services.executor.models.checkpoint import with_context_length
from services.executor.models.dequantize import pieces, to_float32
from services.executor.models.weights import Checkpoint, QuantizedTensor, StoredTensor, Tensor, load_failed
from services.executor.quant.matrix import Fp8Matrix as StoredFp8
from services.executor.quant.matrix import GroupedFormat, GroupedMatrix

log = logging.getLogger("quire.executor")
_SAME_FORMAT = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
_SCALE_COLUMNS = 128


def load_backend(
    checkpoint: Checkpoint,
    device: Device,
    *,
    dtype: str,
    kv_format: str,
    context_length: int | None,
    sizes: StepSizes,
    fixed_splits: bool,
) -> CudaBackend:
    """Loads a model. `dtype` is what is computed in, and what weights become that no kernel multiplies as they are.

    "auto": bf16 where the device multiplies it, else fp16 on a GPU and fp32 under the interpreter; of `kv_format`: the
    same as `dtype`. Raises MODEL_LOAD_FAILED, or INVALID_FIELD for a context length beyond the model's.
    """
    if dtype == "auto":
        on_cpu = device.torch_device.type == "cpu"
        dtype = "bf16" if device.multiplies_bf16 else "fp32" if on_cpu else "fp16"
    spec = with_context_length(checkpoint.spec, context_length)
    loader = _Loader(checkpoint, DTYPES[dtype], device, PRODUCT_SPLIT if fixed_splits else None)
    with torch.inference_mode():
        weights = loader.weights()
    return CudaBackend(
        spec,
        weights,
        device,
        dtype=dtype,
        kv_format=dtype if kv_format == "auto" else kv_format,
        sizes=sizes,
        fixed_splits=fixed_splits,
    )


class _Loader:
    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: Device, fixed_split: int | None) -> None:
        self._checkpoint, self._dtype, self._place = checkpoint, dtype, device.torch_device
        self._fixed_split = fixed_split
        self._sizes: Counter[str] = Counter()  # numbers by format
        self._widened: set[str] = set()  # formats of the file

    def weights(self) -> GpuWeights:
        spec = self._checkpoint.spec
        embedding = self._wide([self._checkpoint.tensor("embedding")])
        layers = [self._layer(f"layers.{index}.") for index in range(spec.layer_count)]
        head: Matrix
        if spec.tied_embeddings:
            head = PlainMatrix(embedding, None, self._fixed_split)
            self._sizes[_name(self._dtype)] += embedding.numel()
        else:
            head = self._matrix(["head"])
        if self._widened:
            log.warning(
                "no kernel multiplies these formats: they were widened",
                extra={"formats": ", ".join(sorted(self._widened)), "to": _name(self._dtype)},
            )
        names = "+".join(name for name, _ in self._sizes.most_common())
        return GpuWeights(embedding, layers, self._vector("final_norm", torch.float32), head, names)

    def _layer(self, prefix: str) -> GpuLayer:
        spec = self._checkpoint.spec

        def matrix(*names: str, bias: bool) -> Matrix:
            return self._matrix(
                [prefix + name for name in names], [f"{prefix}{name}_bias" for name in names] if bias else []
            )

        return GpuLayer(
            attention_norm=self._vector(prefix + "attention_norm", torch.float32),
            qkv=matrix("q", "k", "v", bias=spec.attention_bias),
            o=matrix("o", bias=spec.output_bias),
            mlp_norm=self._vector(prefix + "mlp_norm", torch.float32),
            gate_up=matrix("gate", "up", bias=spec.mlp_bias),
            down=matrix("down", bias=spec.mlp_bias),
        )

    def _matrix(self, names: Sequence[str], bias_names: Sequence[str] = ()) -> Matrix:
        """Matrices below each other: as one where their formats are the same."""
        tensors = [self._checkpoint.tensor(name) for name in names]
        biases = [self._vector(name, self._dtype) for name in bias_names]
        joined = self._joined(tensors, torch.cat(biases) if biases else None)
        if joined is not None:
            return joined
        parts = []
        for i, tensor in enumerate(tensors):
            part = self._joined([tensor], biases[i] if biases else None)
            assert part is not None
            parts.append(part)
        return StackedMatrix(parts)

    def _joined(self, tensors: Sequence[Tensor], bias: torch.Tensor | None) -> Matrix | None:
        """None where one kernel cannot multiply them at once."""
        read = {_kind(tensor) for tensor in tensors}
        if len(read) > 1:
            return None
        (kind,) = read
        numbers = sum(math.prod(tensor.shape) for tensor in tensors)
        found: Matrix | None = None
        if kind == "int4":
            parts = [int4_parts(tensor) for tensor in tensors]
            if any(part is None for part in parts):
                return None if len(tensors) > 1 else self._plain(tensors, bias, numbers)
            found = self._int4([part for part in parts if part is not None], tensors, bias)
        elif kind == "int8":
            found = self._int8(tensors, bias)
        elif kind == "fp8":
            found = self._fp8(tensors, bias)
        else:
            return self._plain(tensors, bias, numbers)
        if found is not None:
            self._sizes[kind] += numbers
        return found

    def _plain(self, tensors: Sequence[Tensor], bias: torch.Tensor | None, numbers: int) -> Matrix:
        self._sizes[_name(self._dtype)] += numbers
        self._widened |= {str(tensor.format) for tensor in tensors if tensor.format not in ("F32", "F16", "BF16")}
        return PlainMatrix(self._wide(tensors), bias, self._fixed_split)

    def _int4(self, parts: Sequence[Int4Parts], tensors: Sequence[Tensor], bias: torch.Tensor | None) -> Matrix | None:
        whole = stacked(parts)
        if whole is None:
            return None
        for part, tensor in zip(parts, tensors, strict=True):
            _check_finite(tensor.name, part.scales, part.offsets)
        dtype = _scale_dtype(self._dtype, whole)
        weight = pack_int4(
            torch.from_numpy(np.ascontiguousarray(whole.codes)).to(self._place),
            torch.from_numpy(whole.scales).to(self._place, dtype),
            None if whole.offsets is None else torch.from_numpy(whole.offsets).to(self._place, dtype),
            whole.group_size,
            None if whole.order is None else torch.from_numpy(whole.order).to(self._place),
        )
        return Int4Matrix(weight, bias, self._fixed_split)

    def _int8(self, tensors: Sequence[Tensor], bias: torch.Tensor | None) -> Matrix:
        codes, scales = [], []
        for tensor in tensors:
            matrix = _read(tensor)
            assert isinstance(matrix, GroupedMatrix)
            _check_finite(tensor.name, matrix.scales, None)
            codes.append((matrix.codes - np.uint8(128)).view(np.int8))
            scales.append(matrix.scales[:, 0])
        weight = Int8Weight(
            torch.from_numpy(np.concatenate(codes)).to(self._place),
            torch.from_numpy(np.concatenate(scales)).to(self._place),
        )
        return Int8Matrix(weight, self._dtype, bias, self._fixed_split)

    def _fp8(self, tensors: Sequence[Tensor], bias: torch.Tensor | None) -> Matrix | None:
        """Scales of rows, or blocks of rows and columns that end where a matrix ends."""
        codes, scales = [], []
        blocks: set[tuple[int, int] | None] = set()
        for tensor in tensors:
            matrix = _read(tensor)
            assert isinstance(matrix, StoredFp8)
            _check_finite(tensor.name, matrix.scales, None)
            rows, columns = matrix.shape
            if matrix.block[1] >= columns:
                blocks.add(None)
                scales.append(np.ascontiguousarray(matrix.scales[np.arange(rows) // matrix.block[0], 0]))
            else:
                blocks.add(matrix.block)
                scales.append(matrix.scales)
                if len(tensors) > 1 and rows % matrix.block[0]:
                    return None
            codes.append(matrix.codes)
        if len(blocks) > 1:
            return None
        (block,) = blocks
        weight = Fp8Weight(
            torch.from_numpy(np.concatenate(codes)).view(torch.float8_e4m3fn).to(self._place),
            torch.from_numpy(np.concatenate(scales)).to(self._place),
            block,
        )
        return Fp8Matrix(weight, self._dtype, bias, self._fixed_split)

    def _wide(self, tensors: Sequence[Tensor]) -> torch.Tensor:
        """[N, K] of the type that is computed in. MODEL_LOAD_FAILED where a tensor is not finite."""
        rows, columns = sum(tensor.shape[0] for tensor in tensors), tensors[0].shape[1]
        out = torch.empty((rows, columns), dtype=self._dtype)
        start = 0
        for tensor in tensors:
            part = out[start : start + tensor.shape[0]]
            start += tensor.shape[0]
            if isinstance(tensor, StoredTensor) and tensor.format == _SAME_FORMAT[self._dtype]:
                part.view(torch.uint8).numpy()[...] = tensor.data
            else:
                for first, piece in pieces(tensor):
                    part[first : first + len(piece)] = torch.from_numpy(piece)
            # A finite sum proves all values finite; only otherwise is a closer look needed.
            if not math.isfinite(float(part.sum(dtype=torch.float32))) and not bool(part.isfinite().all()):
                raise load_failed(f"tensor {tensor.name} holds NaN or infinity as {self._dtype}")
        return out.to(self._place)

    def _vector(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        values = to_float32(self._checkpoint.tensor(name)).reshape(-1)
        _check_finite(name, values, None)
        return torch.from_numpy(values).to(self._place, dtype)


def _kind(tensor: Tensor) -> str:
    """Which kernel could multiply it: "int4", "int8", "fp8" or "plain"."""
    if isinstance(tensor, StoredTensor):
        return "int4" if tensor.format in ("Q4_0", "Q4_1", "Q4_K") else "plain"
    kind = tensor.activations.kind if tensor.activations is not None else None
    columns = tensor.shape[1]
    if isinstance(tensor.format, GroupedFormat):
        if tensor.format.bits == 4:
            return "int4"
        is_row = tensor.format.group_size >= columns and not tensor.format.is_ordered
        return (
            "int8" if kind == "int8" and tensor.format.bits == 8 and tensor.format.is_symmetric and is_row else "plain"
        )
    block_columns = tensor.format.block[1]
    return "fp8" if kind == "fp8" and (block_columns >= columns or block_columns % _SCALE_COLUMNS == 0) else "plain"


def _read(tensor: Tensor) -> object:
    assert isinstance(tensor, QuantizedTensor)
    return tensor.read(0, tensor.shape[0])


def _scale_dtype(dtype: torch.dtype, parts: Int4Parts) -> torch.dtype:
    """Half the bytes where weights become 16 bits anyway and fp16 can hold the scales."""
    numbers = [parts.scales] if parts.offsets is None else [parts.scales, parts.offsets]
    fits = all(
        bool((np.abs(part) < np.finfo(np.float16).max).all())
        and bool(((part == 0) | (np.abs(part) >= np.finfo(np.float16).tiny)).all())
        for part in numbers
    )
    return torch.float16 if dtype != torch.float32 and fits else torch.float32


def _check_finite(name: str, *numbers: np.ndarray[tuple[int, ...], np.dtype[np.float32]] | None) -> None:
    if not all(part is None or bool(np.isfinite(part).all()) for part in numbers):
        raise load_failed(f"tensor {name} holds NaN or infinity")


def _name(dtype: torch.dtype) -> str:
    return next(name for name, known in DTYPES.items() if known == dtype)
