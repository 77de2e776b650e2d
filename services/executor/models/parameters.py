"""How many weights a model has, by the sizes in its config.json, and the bytes they take in a number format."""

from __future__ import annotations

from dataclasses import dataclass

GROUPED_BYTES = {"fp32": 128, "bf16": 64, "fp16": 64, "q8_0": 34, "q4_1": 20, "q4_0": 18}
"""Of 32 weights of a matrix, scales included, in each format."""


@dataclass(frozen=True, slots=True)
class Layers:
    """Sizes that decide the number of weights. `expert_count` 0 is a dense model."""

    layer_count: int
    hidden_size: int
    query_size: int
    key_size: int  # of all heads
    value_size: int
    intermediate_size: int
    vocab_size: int
    tied_embeddings: bool
    attention_bias: bool = False  # of q, k and v
    output_bias: bool = False
    mlp_bias: bool = False
    gated: bool = True
    expert_count: int = 0
    expert_size: int = 0
    shared_size: int = 0  # of experts that every token takes
    dense_layer_count: int = 0  # of a mixture's layers, those that are none


@dataclass(frozen=True, slots=True)
class ParameterCount:
    """Weights in matrices, which number formats shrink, and in vectors, which quantized files keep in fp32."""

    matrices: int
    vectors: int

    @property
    def total(self) -> int:
        return self.matrices + self.vectors

    def size(self, format_: str) -> int:
        """Bytes in a format of GROUPED_BYTES."""
        vector_bytes = 2 if format_ in ("bf16", "fp16") else 4
        return -(-self.matrices * GROUPED_BYTES[format_] // 32) + self.vectors * vector_bytes


def count_parameters(sizes: Layers) -> ParameterCount:
    """Exact for Llama, Mistral and Qwen2; other models have a few vectors more, and attention of their own."""
    hidden, inner = sizes.hidden_size, sizes.intermediate_size
    per_size = 3 if sizes.gated else 2
    attention = hidden * (2 * sizes.query_size + sizes.key_size + sizes.value_size)
    dense = hidden * inner * per_size
    routed = hidden * (per_size * (sizes.expert_count * sizes.expert_size + sizes.shared_size) + sizes.expert_count)
    dense_layers = sizes.dense_layer_count if sizes.expert_count else sizes.layer_count
    ends = sizes.vocab_size * hidden * (1 if sizes.tied_embeddings else 2)
    vectors = 2 * hidden
    vectors += sizes.attention_bias * (sizes.query_size + sizes.key_size + sizes.value_size)
    vectors += sizes.output_bias * hidden
    vectors += sizes.mlp_bias * ((per_size - 1) * inner + hidden)
    mlps = dense_layers * dense + (sizes.layer_count - dense_layers) * routed
    return ParameterCount(ends + sizes.layer_count * attention + mlps, hidden + sizes.layer_count * vectors)
