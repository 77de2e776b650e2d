"""Models of real shapes with random weights, for the torch and the cuda backend alike."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from kernels.activations import quantize_plainly
from kernels.quant_matmul import Fp8Weight, Int8Weight, pack_int4
from services.executor.backends.base import KvShape
from services.executor.backends.cuda.backend import DTYPES, CudaBackend, StepSizes
from services.executor.backends.cuda.device import Device
from services.executor.backends.cuda.matrices import Fp8Matrix, Int4Matrix, Int8Matrix, PlainMatrix
from services.executor.backends.cuda.model import PRODUCT_SPLIT
from services.executor.backends.cuda.weights import GpuLayer, GpuWeights
from services.executor.backends.torch_backend import TorchBackend
from services.executor.backends.torch_linear import UNPADDED, ExactLinear, Linear, NativeLinear
from services.executor.backends.torch_parameters import LayerWeights, ModelWeights
from services.executor.models.spec import ModelSpec

GROUP = 128
_Made = PlainMatrix | Int4Matrix | Int8Matrix | Fp8Matrix

LLAMA_8B = ModelSpec(
    architecture="llama", vocab_size=128256, hidden_size=4096, intermediate_size=14336, layer_count=32, head_count=32,
    kv_head_count=8, head_size=128, context_length=8192, norm_epsilon=1e-5, rope_theta=500000.0,
)  # fmt: skip
SMOLLM2 = ModelSpec(
    architecture="llama", vocab_size=49152, hidden_size=576, intermediate_size=1536, layer_count=30, head_count=9,
    kv_head_count=3, head_size=64, context_length=2048, norm_epsilon=1e-5, rope_theta=100000.0, tied_embeddings=True,
)  # fmt: skip
TINY = ModelSpec(
    architecture="llama", vocab_size=120, hidden_size=64, intermediate_size=48, layer_count=1, head_count=4,
    kv_head_count=2, head_size=16, context_length=128, norm_epsilon=1e-5, rope_theta=10000.0, attention_bias=True,
)  # fmt: skip


def random_weights(spec: ModelSpec, dtype: torch.dtype, device: torch.device, seed: int = 0) -> ModelWeights:
    """Wide enough in attention and head that every token counts and winners are clear."""
    generator = torch.Generator(device).manual_seed(seed)

    def drawn(gain: float, *shape: int) -> Tensor:
        values = torch.randn(*shape, generator=generator, device=device, dtype=dtype)
        return values.mul_(gain / math.sqrt(shape[-1]))

    def norm() -> Tensor:
        return torch.rand(spec.hidden_size, generator=generator, device=device).mul_(0.4).add_(0.8).to(dtype)

    def layer() -> LayerWeights:
        keyed = spec.query_size + spec.kv_size
        qkv = torch.cat((drawn(2.5, keyed, spec.hidden_size), drawn(1.5, spec.kv_size, spec.hidden_size)))
        bias = drawn(1.0, len(qkv)) if spec.attention_bias else None
        inner = spec.intermediate_size
        return LayerWeights(
            norm(), qkv, bias, drawn(1.0, spec.hidden_size, spec.query_size), None,
            norm(), drawn(1.0, 2 * inner, spec.hidden_size), None, drawn(1.0, spec.hidden_size, inner), None,
        )  # fmt: skip

    embedding = drawn(math.sqrt(spec.hidden_size), spec.vocab_size, spec.hidden_size)
    head = embedding if spec.tied_embeddings else drawn(3.0, spec.vocab_size, spec.hidden_size)
    return ModelWeights(embedding, [layer() for _ in range(spec.layer_count)], norm(), head)


def on_cuda(
    spec: ModelSpec, weights: ModelWeights, device: Device, *, dtype: str, format_: str = "plain",
    sizes: StepSizes | None = None, fixed_splits: bool = False, blocks: int = 0, block_size: int = 16,
) -> CudaBackend:  # fmt: skip
    """The cuda backend with KV for one context, or `blocks`. `format_`: plain, int4, int8 or fp8, of the layers."""
    split = PRODUCT_SPLIT if fixed_splits else None
    make = _MATRICES[format_]
    layers = [
        GpuLayer(
            layer.attention_norm.float(),
            make(layer.qkv, layer.qkv_bias, split),
            make(layer.o, layer.o_bias, split),
            layer.mlp_norm.float(),
            make(layer.gate_up, layer.gate_up_bias, split),
            make(layer.down, layer.down_bias, split),
        )
        for layer in weights.layers
    ]
    head = PlainMatrix(weights.head, None, split)
    gpu_weights = GpuWeights(weights.embedding, layers, weights.final_norm.float(), head, format_)
    backend = CudaBackend(
        spec, gpu_weights, device, dtype=dtype, kv_format=dtype, sizes=sizes or StepSizes(), fixed_splits=fixed_splits
    )
    backend.allocate_kv(_shape(backend, spec, blocks, block_size))
    return backend


def on_torch(
    spec: ModelSpec, weights: ModelWeights, device: Device, *, dtype: str, blocks: int = 0, block_size: int = 16
) -> TorchBackend:
    """The torch backend over the same weights."""
    plain = device.torch_device.type == "cpu" and dtype == "fp32"
    linear: Linear = ExactLinear(UNPADDED) if plain else NativeLinear(DTYPES[dtype])
    backend = TorchBackend(spec, weights, linear, dtype, device.torch_device)
    backend.allocate_kv(_shape(backend, spec, blocks, block_size))
    return backend


def meant(weights: ModelWeights, format_: str) -> ModelWeights:
    """The same in fp32, the layers' matrices as `format_` means them."""

    def value(weight: Tensor) -> Tensor:
        matrix = _MATRICES[format_](weight, None, None)
        return matrix.weight.float() if isinstance(matrix, PlainMatrix) else matrix.weight.dequantize()

    layers = [
        LayerWeights(
            one.attention_norm.float(), value(one.qkv), _float(one.qkv_bias), value(one.o), _float(one.o_bias),
            one.mlp_norm.float(), value(one.gate_up), _float(one.gate_up_bias), value(one.down), _float(one.down_bias),
        )
        for one in weights.layers
    ]  # fmt: skip
    return ModelWeights(weights.embedding.float(), layers, weights.final_norm.float(), weights.head.float())


def _float(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.float()


def weight_bytes(spec: ModelSpec, dtype: torch.dtype, layer_bits: float) -> int:
    """Bytes that a decode step reads: matrices of the layers in so many bits a number, the head in `dtype`."""
    layer = spec.hidden_size * (spec.query_size + 2 * spec.kv_size + spec.query_size + 3 * spec.intermediate_size)
    head = spec.vocab_size * spec.hidden_size
    return int(spec.layer_count * layer * layer_bits / 8) + head * dtype.itemsize


def int4_matrix(weight: Tensor, bias: Tensor | None = None, split: int | None = None) -> Int4Matrix:
    """Rounded to nearest in groups of 128, or of a row that is no multiple of 32."""
    rows, columns = weight.shape
    group = GROUP if columns % GROUP == 0 else columns
    grouped = weight.float().view(rows, -1, group)
    scales = grouped.abs().amax(2).clamp_(min=1e-8) / 7.5
    codes = (grouped / scales[..., None] + 8).round_().clamp_(0, 15).to(torch.uint8).view(rows, columns)
    stored = torch.float32 if weight.dtype == torch.float32 else torch.float16
    return Int4Matrix(pack_int4(codes, scales.to(stored), None, group), bias, split)


def _plain(weight: Tensor, bias: Tensor | None, split: int | None) -> _Made:
    return PlainMatrix(weight, bias, split)


def _int8(weight: Tensor, bias: Tensor | None, split: int | None) -> _Made:
    codes, scales = quantize_plainly(weight.float(), "int8")
    return Int8Matrix(Int8Weight(codes, scales), weight.dtype, bias, split)


def _fp8(weight: Tensor, bias: Tensor | None, split: int | None) -> _Made:
    codes, scales = quantize_plainly(weight.float(), "fp8")
    return Fp8Matrix(Fp8Weight(codes, scales), weight.dtype, bias, split)


_MATRICES: dict[str, Callable[[Tensor, Tensor | None, int | None], _Made]] = {
    "plain": _plain, "int4": int4_matrix, "int8": _int8, "fp8": _fp8,
}  # fmt: skip


def _shape(backend: CudaBackend | TorchBackend, spec: ModelSpec, blocks: int, block_size: int) -> KvShape:
    count = blocks or -(-spec.context_length // block_size)
    return KvShape(block_size, backend.kv_block_bytes(block_size), count)
