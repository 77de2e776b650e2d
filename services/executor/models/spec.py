"""A model is data: its shape and constants, read from a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies differ from theta ** (-2i / head_size).

    `linear` divides all by `factor`; `llama3` divides the low ones by it, with a smooth band between; `factors` divides
    each by its own number, as GGUF files store Llama 3's scaling.
    """

    kind: Literal["linear", "llama3", "factors"]
    factor: float = 1.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_context_length: int = 8192
    factors: tuple[float, ...] = ()  # head_size / 2 of them


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Everything about a decoder-only model except its weights."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layer_count: int
    head_count: int
    kv_head_count: int
    head_size: int
    context_length: int
    norm_epsilon: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    attention_bias: bool = False  # biases of q, k and v
    output_bias: bool = False  # bias of the attention output
    mlp_bias: bool = False
    tied_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = field(default=())
    bos_token_id: int | None = None

    @property
    def query_size(self) -> int:
        """Width of the queries of one token in one layer."""
        return self.head_count * self.head_size

    @property
    def kv_size(self) -> int:
        """Width of keys (and of values) of one token in one layer."""
        return self.kv_head_count * self.head_size
