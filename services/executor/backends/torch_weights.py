"""Loads a checkpoint into torch: parts that are used together lie together, and nothing is held twice."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from services.executor.backends.torch_parameters import LayerWeights, ModelWeights
from services.executor.models.dequantize import pieces
from services.executor.models.spec import ModelSpec
from services.executor.models.weights import Checkpoint, StoredTensor, expected_shapes, load_failed

_SAME_FORMAT = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}


def load_weights(
    checkpoint: Checkpoint, dtype: torch.dtype, vector_dtype: torch.dtype, device: torch.device
) -> ModelWeights:
    """Reads every tensor: matrices as `dtype`, norms and biases as `vector_dtype`.

    Raises MODEL_LOAD_FAILED naming a tensor that holds NaN or infinity.
    """
    spec = checkpoint.spec
    loader = _Loader(checkpoint, dtype, vector_dtype, device)
    # Dequantizing is numpy work that mostly runs without the GIL.
    with ThreadPoolExecutor(min(8, torch.get_num_threads())) as pool:
        embedding = pool.submit(loader.joined, ["embedding"])
        head = embedding if spec.tied_embeddings else pool.submit(loader.joined, ["head"])
        layers = [pool.submit(_load_layer, loader, spec, f"layers.{i}.") for i in range(spec.layer_count)]
        final_norm = loader.joined(["final_norm"])
        return ModelWeights(embedding.result(), [layer.result() for layer in layers], final_norm, head.result())


def _load_layer(loader: _Loader, spec: ModelSpec, prefix: str) -> LayerWeights:
    def read(*parts: str) -> Tensor:
        return loader.joined([prefix + part for part in parts])

    return LayerWeights(
        attention_norm=read("attention_norm"),
        qkv=read("q", "k", "v"),
        qkv_bias=read("q_bias", "k_bias", "v_bias") if spec.attention_bias else None,
        o=read("o"),
        o_bias=read("o_bias") if spec.output_bias else None,
        mlp_norm=read("mlp_norm"),
        gate_up=read("gate", "up"),
        gate_up_bias=read("gate_bias", "up_bias") if spec.mlp_bias else None,
        down=read("down"),
        down_bias=read("down_bias") if spec.mlp_bias else None,
    )


class _Loader:
    def __init__(
        self, checkpoint: Checkpoint, dtype: torch.dtype, vector_dtype: torch.dtype, device: torch.device
    ) -> None:
        self._checkpoint, self._dtype, self._vector_dtype, self._device = checkpoint, dtype, vector_dtype, device
        self._shapes = expected_shapes(checkpoint.spec)

    def joined(self, names: Sequence[str]) -> Tensor:
        """The named tensors below each other."""
        first = self._shapes[names[0]]
        rows = [self._shapes[name][0] for name in names]
        dtype = self._dtype if len(first) > 1 else self._vector_dtype
        out = torch.empty((sum(rows), *first[1:]), dtype=dtype)
        start = 0
        for name, count in zip(names, rows, strict=True):
            self._fill(name, out[start : start + count])
            start += count
        return out.to(self._device)

    def _fill(self, name: str, out: Tensor) -> None:
        tensor = self._checkpoint.tensor(name)
        flat = out.view(-1, tensor.shape[-1])
        if isinstance(tensor, StoredTensor) and tensor.format == _SAME_FORMAT[out.dtype]:
            # Copied rather than mapped: a file changed or truncated under a mapping kills the process.
            bytes_ = flat.view(torch.uint8)
            bytes_.numpy()[...] = tensor.data
        else:
            for start, piece in pieces(tensor):
                flat[start : start + len(piece)] = torch.from_numpy(piece)
        # A finite sum proves all values finite; only otherwise is a closer look needed.
        if not math.isfinite(float(out.sum(dtype=torch.float32))) and not bool(out.isfinite().all()):
            raise load_failed(f"tensor {name} holds NaN or infinity as {out.dtype}")
